"""Names stand for what is built in, installed by another package, or importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mopd_dataplane.base.plugins import find_plugin
from mopd_dataplane.errors import UnknownNameError
from mopd_dataplane.records import Prompt
from mopd_dataplane.score.reward import resolve_reward

METADATA = "Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n"
POINTS = "[mopd.importers]\nguest = guest_formats:read\n\n[mopd.rewards]\nshort = guest_formats:is_short\n"
CODE = """
__version__ = "1.0"


def read(fields, place):
    yield fields["said"]


def is_short(prompt, response):
    return len(response) < 3
"""


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package, as pip would leave it in site-packages."""
    info = tmp_path / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "guest_formats.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("guest_formats", None)
    resolve_reward.cache_clear()


def test_the_built_in_one_comes_first(guest: None) -> None:
    assert find_plugin("mopd.importers", "guest", {"guest": 7}) == 7


def test_a_package_offers_one_by_entry_point(guest: None) -> None:
    read = find_plugin("mopd.importers", "guest", {})
    assert list(read({"said": "hi"}, "1")) == ["hi"]


def test_one_is_named_by_module_and_attribute(guest: None) -> None:
    assert find_plugin("mopd.importers", "guest_formats:read", {}) is find_plugin("mopd.importers", "guest", {})


def test_an_installed_reward_scores_as_a_built_in_one(guest: None) -> None:
    reward = resolve_reward("short")
    assert (reward.name, reward.version) == ("short", "1.0")
    prompt = Prompt(prompt_id="p", domain="d", text="?")
    assert [tuple(reward(prompt, text)) for text in ("no", "never")] == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gest", r"no importer 'gest': known: guest, plain; did you mean 'guest'\? \(or give package.module:Name\)"),
        ("no_such_module:read", "importer 'no_such_module:read': cannot import 'no_such_module'"),
        ("guest_formats:nothing", "importer 'guest_formats:nothing': 'guest_formats' has no 'nothing'"),
    ],
)
def test_a_name_that_nobody_offers_is_refused(guest: None, name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        find_plugin("mopd.importers", name, {"plain": None})
