"""The journal's name of a user of the machine is the system's, whatever the environment says."""

import os
import pwd

import pytest

from coordinator.cli.user import os_user


@pytest.mark.parametrize("variable", ["LOGNAME", "USER", "LNAME", "USERNAME"])
def test_the_environment_changes_nobodys_name(monkeypatch, variable):
    monkeypatch.setenv(variable, "somebody-else")
    assert os_user() == f"machine:{pwd.getpwuid(os.getuid()).pw_name}"


def test_a_user_without_a_name_has_a_number(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert os_user() == f"machine:#{2**31 - 7}"
