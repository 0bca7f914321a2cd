"""Lets this process load the plugin of a job, once the policy's key `plugins` names it with these files."""

from edge_client.policy.document import PolicyDocument
from learning.plugins.installed import PluginUnusable, checked
from learning.plugins.loading import admit
from tacit.job import JobDocument
from tacit.plugin import PluginModel

__all__ = ["allow_plugin"]


def allow_plugin(policy: PolicyDocument, job: JobDocument) -> None:
    """Admits the plugin that the job's model comes from, if there is one. Nothing of it is imported.

    Raises:
        PluginUnusable: The policy does not list it, or it is not installed here with the version and files of the job.
    """
    model = job.model
    if not isinstance(model, PluginModel):
        return
    if policy.plugins.get(model.distribution) != model.files:
        raise PluginUnusable(
            f"this member's policy does not allow the plugin {model.distribution} with the files {model.files.hex()}; "
            "`edge_client models` says how to allow it"
        )
    checked(model)
    admit(model)
