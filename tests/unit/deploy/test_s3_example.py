"""The example of an S3 store: its variables are read, and its policy has the rights that the page names."""

import json
import re

from coordinator.config import CoordinatorConfig, environment_name, load_config
from coordinator.storage.bucket import _RIGHTS, place_of
from tests.support.places import ROOT

EXAMPLE = ROOT / "deploy" / "s3"


def test_every_variable_is_a_key_of_the_configuration_and_reads(tmp_path):
    lines = (EXAMPLE / "coordinator.env.example").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    ours = {name for name in given if name.startswith("TACIT_")}
    assert ours <= {environment_name(key) for key in CoordinatorConfig.model_fields}
    (tmp_path / "coordinator.toml").write_text('schema = 1\nadvertise = ["localhost"]\n')
    config = load_config(tmp_path, given)
    place = place_of(config.store_url, endpoint=config.s3_endpoint)
    policy = json.loads((EXAMPLE / "policy.json").read_text())["Statement"]
    assert [each["Resource"] for each in policy] == [
        f"arn:aws:s3:::{place.bucket}",
        f"arn:aws:s3:::{place.bucket}/{place.prefix}*",
    ]


def test_the_policy_the_page_and_the_sentences_name_the_same_rights():
    policy = json.loads((EXAMPLE / "policy.json").read_text())["Statement"]
    allowed = {action for each in policy for action in each["Action"]}
    page = (ROOT / "docs" / "object-storage.md").read_text()
    assert allowed == set(re.findall(r"`(s3:[A-Z]\w+)`", page))
    assert allowed == {*_RIGHTS.values(), "s3:GetBucketVersioning"}
