"""The page of secure aggregation."""

from benchmarks.library.report import Page, Plot, Section
from benchmarks.secure_aggregation.drawings import draw_secure_cost

__all__ = ["PAGE"]

PAGE = Page(
    "secure_aggregation",
    (
        Section(
            "rounds",
            "secure_agg",
            "secure_aggregation.costs --part rounds",
            ("target", "secure_seconds", "clear_seconds", "secure_members_cpu", "clear_members_cpu", "cores"),
            figures=("secure_over_clear_round", "secure_over_clear_without_members"),
        ),
        Section(
            "flower",
            "secure_agg",
            "secure_aggregation.costs --part peer",
            ("target", "peer", "ours", "peer_cpu", "ours_cpu", "checked", "certificate_seconds", "versions"),
            figures=(
                "server_times_faster_than_flower",
                "client_times_faster_than_flower",
                "upload_bytes_per_value",
                "max_abs_error",
            ),
        ),
        Section(
            "cipher",
            "secure_agg",
            "secure_aggregation.costs --part cipher limit",
            ("target", "ours", "raw", "one_thread", "raw_block_bytes", "idle_bytes", "peak_bytes"),
            figures=("share_of_cipher_limit", "thread_speedup", "server_peak_vectors"),
        ),
        Section(
            "cost",
            "secure_agg",
            "secure_aggregation.costs --part cost limit",
            ("timed", "checked"),
            where={"graph": ("complete", "sparse")},
            wide=("client_cpu_seconds", "server_seconds"),
            figures=("client_cpu_seconds", "server_seconds"),
            plots=(Plot("secure_agg_cost.svg", "Time of a member and of the server", draw_secure_cost),),
        ),
        Section(
            "groups",
            "secure_agg",
            "secure_aggregation.costs --part groups",
            (
                "timed",
                "honest",
                "threshold",
                "roster_seconds",
                "group_seconds",
                "sent",
                "received",
                "roster_bytes",
                "group_bytes",
                "worker_peak_bytes",
            ),
            where={"graph": ("grouped",)},
        ),
        Section(
            "hybrid",
            "secure_agg",
            "secure_aggregation.costs --part hybrid",
            ("target", "hybrid_seconds", "classic_seconds", "hybrid_bytes", "classic_bytes"),
            figures=("hybrid_over_classic_client", "hybrid_over_classic_server", "hybrid_bytes_per_neighbour"),
        ),
        Section(
            "signatures",
            "secure_agg",
            "secure_aggregation.costs --part hybrid",
            ("mldsa_us", "rsa_us", "rsa_bytes"),
            figures=("mldsa_over_rsa_sign", "mldsa_over_rsa_verify", "mldsa_signature_bytes"),
        ),
        Section(
            "bounds",
            "masked_bounds",
            "secure_aggregation.bounds.costs",
            ("of", "answers_bytes", "today_bytes", "bits"),
        ),
        Section(
            "memory",
            "aggregation_memory",
            "secure_aggregation.memory",
            ("target", "idle_bytes", "peak_bytes"),
        ),
    ),
)
