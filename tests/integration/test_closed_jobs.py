"""A dry run of a job that is not open names the job, says how it ended, and sends nothing."""

import json

from tests.support.processes import command, running_federation

MEMBERS = ("aster", "birch", "cedar")


def test_a_dry_run_says_that_a_job_is_finished_paused_or_aborted(tmp_path):
    with running_federation(tmp_path, *MEMBERS) as federation:

        def looked(*more):
            home, data = federation.home("aster"), federation.data("aster")
            done = command("edge_client", "run", "--dry-run", "--home", home, "--data", data, *more)
            assert done.returncode == 0, done.stderr
            return done.stdout

        federation.job("early", count=1)
        for name in MEMBERS:
            federation.start(name, "--until-finished")
        federation.finished("early")
        # It is the only job, so --job is not needed.
        finished = "early is finished: The job has done all its rounds. Nothing would be sent; "
        assert looked() == finished + "`edge_client export early` makes your model.\n"

        federation.job("late")
        federation.operator("job", "pause", "late")
        paused = "late is paused: The operator paused the job. Nothing would be sent; "
        assert looked("--job", "late").startswith(paused)
        told = json.loads(looked("--job", "late", "--json"))
        assert (told["status"], told["takes_part"], told["refusals"]) == (
            "paused",
            False,
            ["The operator paused the job."],
        )

        federation.operator("job", "resume", "late")
        shown = looked()
        assert "late: 60 examples here" in shown
        # Without --job, the dry run shows open jobs only.
        assert "early" not in shown

        federation.operator("job", "abort", "late", "--yes")
        assert looked("--job", "la*").startswith("late is aborted: The operator aborted the job.")
        assert looked("--job", "none").startswith("The coordinator has no job named none;")
