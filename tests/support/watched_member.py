"""`edge_client run`, as `examples/demo/member.py` starts it, recorded from inside. It can also leak on purpose.

    python -m tests.support.watched_member RECORDS [--leak] -- OPTIONS OF edge_client run

For each update that is ready, it writes RECORDS/JOB.ROUND.npz with what training computed: `change`, the gradients of
the first and the last step and the weights after the last (`gradient0`, ..., `weight0`, ...), `losses` of the steps,
and `metrics` (loss sum, correct, count). Before each vector is masked, it writes RECORDS/JOB.ROUND.ATTEMPT.npy. A test
searches for these in what left. With --leak, it breaks the rules and sends some of them (`_leak` says what and where).
"""

import sys
from pathlib import Path

from toolkit.console import run_app
from toolkit.tls import tls_13_only


def main() -> None:
    """Command line."""
    records, leak = Path(sys.argv[1]), "--leak" in sys.argv[2 : sys.argv.index("--")]
    sys.argv = ["edge_client", *sys.argv[sys.argv.index("--") + 1 :]]
    # Before anything imports gRPC.
    tls_13_only()

    import edge_client.agent.runner
    from edge_client.cli import app

    run_member = edge_client.agent.runner.run_member
    edge_client.agent.runner.run_member = lambda options, **more: run_member(options, _recorder(records), **more)
    if leak:
        _leak()
    run_app(app)


def _recorder(records: Path):
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from edge_client.agent.watching import LogWatcher
    from learning.training.task import LocalTraining

    seen: dict[str, list] = {"gradient": [], "weight": [], "losses": [], "metrics": []}

    def arrays(optimiser: torch.optim.Optimizer, what: str) -> list[np.ndarray]:
        parameters = [each for group in optimiser.param_groups for each in group["params"]]
        tensors = [each.grad if what == "gradient" else each.detach() for each in parameters]
        return [each.numpy().copy() for each in tensors if each is not None]

    def before(optimiser: torch.optim.Optimizer, *_: object) -> None:
        seen["gradient"] = [*seen["gradient"][:1], arrays(optimiser, "gradient")]

    def after(optimiser: torch.optim.Optimizer, *_: object) -> None:
        seen["weight"] = [arrays(optimiser, "weight")]

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    plain = LocalTraining.plain

    def noted_plain(self, rows=None):
        result = plain(self, rows)
        seen["metrics"] = [result.loss_sum, result.correct, result.count]
        return result

    LocalTraining.plain = noted_plain

    class Recorder(LogWatcher):
        def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
            super().training(job, round, step, steps, loss)
            seen["losses"].append(loss)

        def ready(self, job, round, update) -> None:
            super().ready(job, round, update)
            parts = {
                f"{what}{number}": array
                for what in ("gradient", "weight")
                for number, array in enumerate(each for step in seen[what] for each in step)
            }
            numbers = {"losses": np.array(seen["losses"]), "metrics": np.array(seen["metrics"], dtype=float)}
            np.savez(records / f"{job}.{round}.npz", change=update.change, **numbers, **parts)
            for values in seen.values():
                values.clear()

        def encoded(self, attempt, vector) -> None:
            np.save(records / f"{attempt.job}.{attempt.round}.{attempt.attempt}.npy", vector)

    return Recorder()


def _leak() -> None:
    """Leaks the following. Each must be found by one or both searches (A: allow-list, C: canaries):

    the first text           in the detail of Decline                          A, C
    the second, hexadecimal  in metadata of FetchBlob                          A, C
    the third, enciphered    in an unknown field of Ready                      A; C has nothing to search for
    the last step's loss     as the epsilon reported in Ready                  A, C
    the fourth, 16 bytes     as the process of Hello, which is any 16 bytes    C; A has nothing to object to
    the vector               unmasked, in place of the masked one              A (its digest), C
    """
    import secure_agg
    from edge_client.agent.watching import LogWatcher
    from edge_client.identity.pace import Pace
    from edge_client.session import agent
    from tacit import messages, wire

    texts: list[str] = []
    last_loss = [0.0]
    fetch, mask, to_coordinator = Pace.fetching, agent.Agent._mask, wire.to_coordinator
    begin, training = agent.Agent.__init__, LogWatcher.training

    def leaky_begin(self, identity, environment, journal, preparer, *more, **others):
        begin(self, identity, environment, journal, preparer, *more, **others)
        texts[:] = [example.text for example in preparer._examples[:4]]
        self._process = texts[3].encode()[:16]

    def leaky_fetch(self, method):
        return fetch(self, lambda request: method(request, metadata=[("note", texts[1].encode().hex())]))

    def leaky_to_coordinator(message):
        encoded = to_coordinator(message)
        if isinstance(message, messages.Decline):
            encoded.decline.detail = texts[0]
        if isinstance(message, messages.Ready):
            encoded.ready.privacy.epsilon = last_loss[0]
            hidden = bytes(byte ^ 0xA5 for byte in texts[2].encode()[:100])
            # Field 99, length-delimited, which no reader knows.
            field = b"\x9a\x06" + len(hidden).to_bytes(1, "big") + hidden
            encoded.ready.MergeFromString(field)
        return encoded

    def leaky_mask(self, effect, held):
        clear = []
        encoded = self._observer.encoded

        def keep(attempt, vector):
            clear.append(vector.copy())
            encoded(attempt, vector)

        self._observer.encoded = keep
        _, stage, message = mask(self, effect, held)
        return secure_agg.pack_in_place(clear[0], effect.stage.seat.context.bits), stage, message

    def noted_training(self, job, round, step, steps, loss):
        last_loss[0] = loss
        training(self, job, round, step, steps, loss)

    agent.Agent.__init__ = leaky_begin
    agent.Agent._mask = leaky_mask
    Pace.fetching = leaky_fetch
    LogWatcher.training = noted_training
    wire.to_coordinator = leaky_to_coordinator


if __name__ == "__main__":
    run_app(main)
