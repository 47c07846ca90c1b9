import sys

import pytest

from sandbox.port import SandboxUnavailableError
from sandbox.probe import check_available, explain_refusal, find_bwrap


def test_it_is_available_here():
    check_available()


def test_other_systems_are_told_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="WSL"):
        check_available()


@pytest.mark.parametrize(
    ("sysctls", "remedy"),
    [
        ({"user.max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=15000"),
        ({"kernel.unprivileged_userns_clone": "0"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            {"kernel.apparmor_restrict_unprivileged_userns": "1"},
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, "/etc/apparmor.d/trajlake-bwrap"),
        ({"kernel.apparmor_restrict_unprivileged_userns": "0"}, "--security-opt seccomp=unconfined"),
        ({}, "--security-opt seccomp=unconfined"),
    ],
)
def test_each_refusal_names_its_remedy(sysctls, remedy):
    message = explain_refusal("/usr/bin/bwrap", "bwrap: setting up uid map: Permission denied\n", sysctls)
    assert remedy in message
    assert "setting up uid map: Permission denied" in message


def test_user_namespaces_switched_off_for_real_are_named(tmp_path, monkeypatch):
    """A bwrap inside a sandbox, where the kernel really refuses user namespaces (max_user_namespaces is used up)."""
    real = find_bwrap()
    outer = "--unshare-all --unshare-user --disable-userns --dev-bind / / --"
    wrapper = tmp_path / "bwrap"
    wrapper.write_text(f'#!/bin/sh\nexec {real} {outer} {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("TRAJLAKE_BWRAP", str(wrapper))
    with pytest.raises(SandboxUnavailableError, match=r"Remedy.*namespace"):
        check_available()


def test_a_missing_binary_is_named(monkeypatch):
    monkeypatch.setenv("TRAJLAKE_BWRAP", "/no/such/bwrap")
    with pytest.raises(SandboxUnavailableError, match="correct or unset TRAJLAKE_BWRAP"):
        check_available()
