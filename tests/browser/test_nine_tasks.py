"""Nine things that people look for in a run, in a real Chromium, each with at most two clicks or one field.

`pytest -m browser -s tests/browser/test_nine_tasks.py` prints the lines of the table in docs/viewer.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import matching, opened, ready, viewing
from playwright.sync_api import Browser, Locator, Page, expect

from mopd_dataplane import Store
from mopd_dataplane.view.export import export_redpen
from mopd_dataplane.view.shown import Shown

pytestmark = pytest.mark.browser
TABLE = (Path(__file__).parents[2] / "docs" / "viewer.md").read_text()
CHART = ".chart .u-over"


class Hand:
    """A person's hand on a page: counts clicks and fields, and the time from the open page to the answer."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = self.fields = 0
        self._began = time.monotonic()

    def click(self, what: Locator) -> None:
        self.clicks += 1
        what.click()

    def click_curve(self, chart: int) -> None:
        self.clicks += 1
        self.page.locator(CHART).nth(chart).click(position={"x": 3, "y": 40})

    def fill(self, what: Locator, text: str) -> None:
        self.fields += 1
        what.fill(text)
        what.press("Enter")

    def done(self, task: str) -> None:
        """The answer is on the screen, with the clicks and fields that the page on the viewer names."""
        print(f"\n| {task} | {self.clicks} | {self.fields} | {time.monotonic() - self._began:.1f} s |")
        assert (self.clicks <= 2 and not self.fields) or (not self.clicks and self.fields == 1)
        assert re.search(rf"^\| {re.escape(task)} \| {self.clicks} \| {self.fields} \|", TABLE, re.MULTILINE), task


@pytest.fixture(scope="module")
def address(
    demo_store: Store, make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    other = make_store(tmp_path_factory.mktemp("nine") / "other", prompts=8, seed=1)
    with viewing(str(demo_store.uri), str(other.uri)) as address:
        yield address


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address, []) as page:
        yield page


@pytest.fixture
def at(page: Page, address: str) -> Callable[[str], Hand]:
    def go(view: str) -> Hand:
        page.goto(f"{address.split('?')[0]}#/{view}")
        ready(page)
        return Hand(page)

    return go


def test_the_worst_sample_and_what_its_teacher_would_have_said(at: Callable[[str], Hand], demo_store: Store) -> None:
    hand = at("home")
    worst = hand.page.locator(".state .worst a")
    newest = "iteration = (select max(iteration) from rollouts)"
    expected = demo_store.sql(f"select max(kl) as kl from rollouts where {newest} group by domain").num_rows
    assert worst.count() == expected
    hand.click(worst.first)
    expect(hand.page.locator("h1")).to_contain_text("Sample")
    hand.done("the worst sample of each teacher in the newest iteration")
    expect(hand.page.locator(".strip .t.chosen")).to_be_visible()
    expect(hand.page.get_by_text("whole vocabulary, from hidden state × head").first).to_be_visible()
    hand.done("what its teacher would have said at the token it disliked most")


def test_answers_to_one_prompt_over_all_versions(at: Callable[[str], Hand]) -> None:
    hand = at("samples")
    hand.click(hand.page.locator("tbody tr").first)
    hand.click(hand.page.locator("a", has_text=re.compile("-train-")).first)
    expect(hand.page.locator("h1")).to_contain_text("prompt", ignore_case=True)
    hand.done("one prompt's answers over all versions")


def test_samples_of_an_iteration_where_a_curve_jumps(at: Callable[[str], Hand]) -> None:
    hand = at("home")
    hand.click(hand.page.get_by_role("link", name="Run", exact=True))
    expect(hand.page.locator(f"{CHART}").first).to_be_visible()
    hand.click_curve(0)
    expect(hand.page.locator("tbody tr").first).to_be_visible()
    hand.done("the samples of an iteration where a curve jumps")


def test_groups_without_spread(at: Callable[[str], Hand], demo_store: Store) -> None:
    hand = at("samples")
    hand.fill(hand.page.get_by_label("Filter as SQL"), "group_spread = 0")
    count = demo_store.sql("select count(*) as n from rollouts where group_spread = 0").to_pylist()[0]["n"]
    expect(hand.page.locator("#matching")).to_contain_text(f"{count} of ")
    hand.done("groups whose rewards are all equal")


def test_a_regular_expression_among_answers_of_low_reward_by_kl(at: Callable[[str], Hand], demo_store: Store) -> None:
    hand = at("samples")
    question = "reward < 0.5 and regexp_matches(response, '9{3}') order by kl desc"
    hand.fill(hand.page.get_by_label("Filter as SQL"), question)
    expect(hand.page.get_by_label("Search in responses")).to_have_value("9{3}")
    expected = demo_store.sql(
        "select uid from rollouts where reward < 0.5 and uid in"
        " (select uid from responses where regexp_matches(response, '9{3}')) order by kl desc nulls last"
    )["uid"].to_pylist()
    assert matching(hand.page) == len(expected) > 1
    rows = hand.page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.dataset.uid)")
    assert rows == expected[:50]
    hand.done("a regular expression among answers of low reward, sorted by KL")


def test_two_runs_prompt_by_prompt(at: Callable[[str], Hand]) -> None:
    hand = at("home")
    hand.click(hand.page.get_by_role("link", name="Compare", exact=True))
    hand.clicks += 1
    box, other = hand.page.get_by_label("A", exact=True), hand.page.get_by_label("B", exact=True)
    chosen = other.input_value().partition("|")
    box.select_option(value="|".join(["0" if chosen[0] == "1" else "1", chosen[2]]))
    expect(hand.page.get_by_text("prompts answered by both")).to_be_visible()
    hand.done("two runs, prompt by prompt")


def test_an_answer_is_copied_and_labelled(at: Callable[[str], Hand], page: Page) -> None:
    other = at("samples?store=1").page.locator("tbody tr")
    other.nth(1).click()
    typed = page.get_by_label("Label", exact=True)
    typed.fill("odd")
    typed.press("Enter")
    expect(page.get_by_role("button", name="Remove label odd")).to_be_visible()
    at("samples?store=1").page.locator("tbody tr").first.click()
    ready(page)
    hand = Hand(page)
    hand.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    hand.click(hand.page.get_by_role("button", name="copy answer"))
    expect(hand.page.get_by_role("button", name="copied")).to_be_visible()
    assert hand.page.evaluate("navigator.clipboard.readText()")
    expect(page.get_by_role("button", name="Remove label odd")).to_have_count(0)
    hand.click(hand.page.get_by_role("button", name="+ odd"))
    expect(page.get_by_role("button", name="Remove label odd")).to_be_visible()
    hand.done("copy an answer as text and label it")


def test_a_view_is_handed_to_somebody(at: Callable[[str], Hand], demo_store: Store, tmp_path: Path) -> None:
    hand = at("samples?w=reward%20%3D%201&order=-kl")
    first = hand.page.locator("tbody tr").first.get_attribute("data-uid")
    hand.page.reload()
    ready(hand.page)
    assert hand.page.locator("tbody tr").first.get_attribute("data-uid") == first
    file = tmp_path / "red-pen.html"
    export_redpen(Shown(demo_store), file)
    assert file.stat().st_size < 3_000_000
    hand.done("hand a view to somebody: its address, or one file that opens from disk")
