"""`mopd view` as a person uses it, in a real Chromium: keys, clicks, reload, back; no error, no request elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from browsing import matching, opened, ready, viewing
from hostile import NAME, make_hostile
from playwright.sync_api import Browser, Page, expect

from mopd_dataplane import Signal, Store
from mopd_dataplane.query.text import visible
from mopd_dataplane.store.commit.token_stats import TokenStats, write_token_stats

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def store(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demonstration store, whose first samples two more teachers scored; one of them with its top-k."""
    store = make_store(tmp_path_factory.mktemp("viewed") / "demo", prompts=4)
    noise = np.random.default_rng(3)
    rows = store.sql("select uid, domain from samples")
    chain_sum_samples = [
        (row, uid) for row, uid in enumerate(rows["uid"].to_pylist()) if rows["domain"][row].as_py() == "chain_sum"
    ]
    for teacher in ("spell_backward-expert", "number_sorting-expert"):
        signals = []
        for row, uid in chain_sum_samples:
            payload = store.read_tokens([row]).to_pylist()[0]
            mask, said = np.array(payload["loss_mask"], bool), np.array(payload["logprobs"], np.float32)
            logprob = np.where(mask, np.minimum(said + noise.normal(-1, 1.5, len(said)), -1e-3), 0).astype(np.float32)
            signals.append(Signal(uid=uid, sample_row=row, kind="logprob", logprob=logprob,
                                  mean_reverse_kl=float((said - logprob)[mask].mean())))  # fmt: skip
        store.commit_signals(teacher, "logprob", signals)
    counts = store.take_samples([row for row, _ in chain_sum_samples], ["loss_tokens"])["loss_tokens"].to_pylist()
    write_token_stats(store, [
        TokenStats(sample_row=row, stage="student", teacher="chain_sum-expert", step=2,
                   values={"reverse_kl": np.full(count, 0.75), "logprob_gap": np.full(count, -0.25)})
        for (row, _), count in zip(chain_sum_samples, counts, strict=True)
    ])  # fmt: skip
    return store


@pytest.fixture(scope="module")
def address(store: Store) -> Iterator[str]:
    with viewing(store.uri) as address:
        yield address


@pytest.fixture
def refusals() -> list[str]:
    """Codes of refusals that a test provokes; Chromium logs each as an error."""
    return []


@pytest.fixture
def page(browser: Browser, address: str, refusals: list[str]) -> Iterator[Page]:
    with opened(browser, address, refusals) as page:
        yield page


def test_the_token_leaves_the_address(page: Page) -> None:
    assert "token" not in page.url
    assert page.context.cookies()[0]["httpOnly"] is True


def test_a_bar_filters_and_back_undoes_it(page: Page, store: Store) -> None:
    everything = matching(page)
    bar = page.locator("#h-domain-0")
    bar_count = int(re.search(r"of (\d+)", bar.get_attribute("aria-label") or "")[1])
    bar.click()
    expect(page.locator("#matching")).to_contain_text(f"{bar_count} of {everything}")
    assert page.locator("#where").input_value().startswith("domain in (")
    page.reload()
    expect(page.locator("#matching")).to_contain_text(f"{bar_count} of {everything}")
    page.go_back()
    expect(page.locator("#matching")).to_contain_text(f"{everything} of {everything}")


def test_each_head_stands_over_its_column(page: Page) -> None:
    page.locator("#h-domain-0").wait_for()  # heads are drawn again with their histograms
    heads = [re.sub(r"\s+", " ", text).strip() for text in page.locator("thead th").all_inner_texts()]
    cells = page.locator("tbody tr").first.locator("th, td").all_inner_texts()
    assert len(heads) == len(cells)
    assert heads[:6] == ["uid", "prompt", "answer", "kl nat/token", "reward", "domain"]
    assert cells[heads.index("stage")] == "student"
    assert cells[heads.index("domain")] in ("chain_sum", "spell_backward", "number_sorting")


def test_an_address_that_was_mangled_on_its_way_still_opens(page: Page, refusals: list[str]) -> None:
    refusals += ["400", "404"]
    base = page.url.split("#")[0]
    for rest in ("q=%", "f=5", "f=%5Bnull%2C%7B%22c%22%3A5%7D%5D", "f=%5B%7B%22c%22", "at=x&page=y", "cols=nosuch"):
        page.goto(f"{base}#/samples?{rest}")
        expect(page.locator("#matching")).to_be_visible()
        ready(page)
    page.keyboard.press("Enter")
    expect(page.locator(".strip .t.chosen")).to_be_visible()
    page.goto(page.url.split("?")[0] + "?t=x&s=nosuch&teacher=nobody")
    expect(page.locator(".strip .t.chosen")).to_be_visible()
    page.goto(base + "#/sample/%E0%A4%A")
    expect(page.get_by_role("alert")).to_contain_text("no sample")


def test_the_filter_is_sql_that_can_be_edited(page: Page, store: Store, refusals: list[str]) -> None:
    refusals.append("400")
    page.keyboard.press("f")
    page.keyboard.type("reward = 1 and response_len > 20")
    page.keyboard.press("Enter")
    expected = store.sql(
        "select count(*) as n from samples join rewards using (uid) where reward = 1 and response_len > 20"
    )
    expect(page.locator("#matching")).to_contain_text(f"{expected['n'][0].as_py()} of")
    page.locator("#where").fill("nonsense(")
    page.locator("#where").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not an SQL expression")
    expect(page.locator("#where")).to_have_value("nonsense(")
    expect(page.locator("#where")).to_be_focused()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("reward = 1")
    page.keyboard.press("Enter")
    expect(page.locator("#matching")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("alert")).to_be_visible()
    page.go_back()
    expect(page.locator("#matching")).to_be_visible()


def test_a_click_anywhere_in_a_row_opens_it_at_the_most_disliked_token(page: Page, store: Store) -> None:
    page.goto(page.url.split("#")[0] + "#/samples?order=-kl")
    ready(page)
    row = page.locator("tbody tr").nth(1)
    uid = row.get_attribute("data-uid") or ""
    row.locator("[data-c=reward]").click()
    expect(page.locator("h1 code")).to_have_text(uid[:10])
    [sample] = store.sql(f"select sample_row, prompt_len, domain from samples join scores using (uid) "
                         f"where uid = '{uid}' limit 1").to_pylist()  # fmt: skip
    teachers = store.sql(f"select min(teacher) as teacher from scores where uid = '{uid}' and kind = 'logprob'")
    teacher = teachers["teacher"][0].as_py()
    payload = store.read_tokens([sample["sample_row"]]).to_pylist()[0]
    signal = store.read_signal(teacher, "logprob", [sample["sample_row"]])[0]
    ratio = np.where(payload["loss_mask"], signal - np.array(payload["logprobs"], np.float32), np.inf)
    expect(page.locator(".strip .t.chosen")).to_have_id(f"t{int(ratio.argmin())}")


def test_a_curve_of_the_run_leads_to_the_samples_of_its_iteration(page: Page, store: Store) -> None:
    everything = matching(page)
    page.goto(page.url.split("#")[0] + "#/run")
    page.locator(".chart .u-over").first.click(position={"x": 2, "y": 40})
    [first] = store.sql("select count(*) as n from samples where iteration = 0 and stage = 'student'").to_pylist()
    expect(page.locator("#matching")).to_contain_text(f"{first['n']} of {everything}")


def test_sorting_by_a_head_and_turning_to_a_sample_by_keys(page: Page) -> None:
    page.get_by_role("button", name="kl nat/token", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_have_count(1)
    ready(page)
    uids = page.locator("tbody tr").evaluate_all("rows => rows.map(r => r.dataset.uid)")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1 code")).to_have_text(uids[1][:10])
    page.keyboard.press("j")
    expect(page.locator("h1 code")).to_have_text(uids[2][:10])
    page.keyboard.press("u")
    expect(page.locator("#matching")).to_be_visible()


def open_scored(page: Page) -> None:
    """A sample that three teachers scored, interrupted and full of markup."""
    page.goto(page.url.split("#")[0] + "#/samples?w=" + "teachers%20%3D%203%20and%20interrupted&order=-kl")
    expect(page.locator("#matching")).to_contain_text("4 of")
    ready(page)
    page.keyboard.press("Enter")
    expect(page.locator(".strip .t").first).to_be_visible()


def test_all_teachers_over_one_text(page: Page) -> None:
    open_scored(page)
    tracks = page.locator(".tracks li").all_inner_texts()
    assert [track.split(maxsplit=1)[1] for track in tracks] == [
        "chain_sum-expert", "number_sorting-expert", "spell_backward-expert", "disagreement",
    ]  # fmt: skip
    token = page.locator(".strip #t0")
    assert token.evaluate("node => getComputedStyle(node).backgroundImage").count("px") >= 8, (
        "a colour behind, a track a teacher"
    )
    assert page.locator(".strip .t.masked").count() == 2, "tokens that the policy did not write"
    assert page.locator(".strip .t.starts").count() == 1, "where the next policy version goes on"
    text = "".join(page.locator(".strip .t").all_inner_texts())
    assert "<script>alert(1)</script>" in text, "markup of a model is text"
    assert "\x1b" not in text


def test_keys_walk_tokens_surprises_teachers_and_signals(page: Page) -> None:
    open_scored(page)
    page.locator(".strip #t0").click()
    page.keyboard.press("l")
    page.keyboard.press("l")
    expect(page.locator(".card .where")).to_contain_text("position 2 of")
    assert "t=2" in page.url
    page.keyboard.press("n")
    after = int(re.search(r"[?&]t=(\d+)", page.url)[1])
    assert after > 2
    page.keyboard.press("]")
    expect(page.locator(".controls select").nth(1)).to_have_value("number_sorting-expert")
    page.locator(".controls select").first.select_option("spread")
    expect(page.locator(".controls select").first).to_have_value("spread")
    url = page.url
    page.reload()
    expect(page.locator(".strip .t.chosen")).to_be_visible()
    assert page.url == url
    assert f"t{after}" == page.locator(".strip .t.chosen").get_attribute("id")


def test_statistics_of_training_are_in_the_menu_and_on_the_card(page: Page) -> None:
    open_scored(page)
    page.locator(".strip #t1").click()
    expect(page.locator(".card .facts").last).to_contain_text("reverse KL, exact, step 2")
    expect(page.locator(".card .facts").last).to_contain_text("0.75")
    menu = page.locator(".controls select").first
    menu.select_option(label="trainer − sampler log-prob, step 2")
    expect(page.locator(".legend")).to_have_attribute("aria-label", re.compile("trainer − sampler"))
    assert "s=stat" in page.url


def test_the_card_shows_every_teacher_and_its_candidates(page: Page) -> None:
    open_scored(page)
    page.locator(".strip #t1").click()
    expect(page.locator(".card .said tbody tr")).to_have_count(4)
    expect(page.locator(".card .candidates h3").first).to_have_text("chain_sum-expert")
    expect(page.locator(".card .candidates li").first).to_be_visible()
    expect(page.locator(".card .candidates p").first).to_contain_text("hidden state × head")


def test_groups_versions_and_differences(page: Page) -> None:
    open_scored(page)
    page.keyboard.press("g")
    expect(page.locator("h1")).to_contain_text("Group")
    page.keyboard.press("g")
    expect(page.locator(".answered")).to_have_count(4)
    expect(page.locator(".pair")).to_be_visible()
    expect(page.locator(".chart canvas").first).to_be_visible()


def test_two_stores_are_compared_down_to_the_tokens(
    browser: Browser, store: Store, make_store: Callable[..., Store], tmp_path: Path
) -> None:
    other = make_store(tmp_path / "other-run", prompts=4, seed=1)
    with viewing(store.uri, other.uri) as address, opened(browser, address, []) as page:
        page.keyboard.press("4")
        expect(page.locator("h1")).to_have_text("Compare")
        page.get_by_label("B", exact=True).select_option(label="other-run · student · iteration 0")
        page.locator("tbody a[href*='other=1']").filter(has_not_text="-0").first.click()
        expect(page.locator(".pair")).to_be_visible()
        uids = [re.search(rf"[?&]{side}=([0-9a-f]+)", page.url)[1] for side in "ab"]
        said = [
            of.sql(f"select response from responses where uid = '{uid}'")["response"][0].as_py()
            for of, uid in zip((store, other), uids, strict=True)
        ]
        assert said[0] != said[1]
        assert page.locator(".pair > div p").all_inner_texts() == said
        page.locator(".pair h3 a").click()
        expect(page.locator("h1")).to_contain_text(uids[1][:8])
        assert "store=1" in page.url


def test_life_run_teachers_step_and_compare(page: Page) -> None:
    open_scored(page)
    page.keyboard.press("i")
    expect(page.locator(".life li.trained")).to_have_count(1)
    page.get_by_role("link", name="packs of this step").click()
    expect(page.locator(".pack").first).to_be_visible()
    page.keyboard.press("2")
    expect(page.locator(".chart canvas").nth(6)).to_be_visible()
    expect(page.locator(".track-bar i").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Chrome trace").click()
    assert '"traceEvents"' in Path(download.value.path()).read_text()
    page.keyboard.press("3")
    expect(page.get_by_role("cell", name="logprob fp32").first).to_be_visible()
    page.keyboard.press("4")
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    expect(page.locator("tbody tr").first).to_contain_text("→")
    page.keyboard.press("5")
    expect(page.locator(".status")).to_contain_text("3 rows")


def test_search_finds_text_and_lands_on_the_token(page: Page, refusals: list[str]) -> None:
    refusals.append("400")
    page.keyboard.press("/")
    page.keyboard.type("script>")
    page.keyboard.press("Enter")
    expect(page.locator("#matching")).to_contain_text("12 of")
    expect(page.locator("tbody td.text").nth(1)).to_contain_text("<script>")
    page.locator("#where").fill("reward < 1")
    page.locator("#where").press("Enter")
    expect(page.locator("#matching")).not_to_contain_text("12 of")
    assert "q=script" in page.url
    page.get_by_role("button", name="kl nat/token").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_count(1)
    expect(page.locator("tbody td.text").nth(1)).to_contain_text("<script>")
    page.locator("tbody a").first.click()
    expect(page.locator(".strip .t.chosen")).to_have_text("s")
    page.go_back()
    page.locator("#search").fill("(")
    page.locator("#search").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not a regular expression")
    expect(page.locator("#search")).to_be_focused()
    assert page.locator("tbody tr").count() > 0


def test_labels_are_written_and_taken_back(page: Page, store: Store) -> None:
    open_scored(page)
    page.get_by_label("Label", exact=True).fill("odd one")
    page.get_by_label("Note").fill("<i>see</i>")
    page.get_by_role("button", name="add").click()
    expect(page.locator(".labels li")).to_contain_text("odd one")
    page.reload()
    expect(page.locator(".labels li")).to_contain_text("<i>see</i>")
    sample = page.url
    page.get_by_role("link", name="Samples", exact=True).click()
    page.get_by_role("button", name="🏷 odd one").click()
    expect(page.locator("#matching")).to_contain_text("1 of ")
    page.goto(sample)
    page.get_by_role("button", name="Remove label odd one").click()
    expect(page.locator(".labels li")).to_have_count(0)


def test_a_screen_reader_finds_its_way(page: Page) -> None:
    assert page.get_by_role("navigation", name="Pages", exact=True).count() == 1
    assert page.get_by_role("table", name="Samples").count() == 1
    assert page.get_by_role("listbox", name=re.compile("Histogram of reward")).count() == 1
    page.get_by_role("listbox", name=re.compile("Histogram of domain")).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#said")).to_contain_text(" of ")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_value(re.compile("domain in"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "light"), (360, "dark"), (1440, "light"), (3840, "light"), (3840, "dark")]
)
def test_every_page_fits_its_window(browser: Browser, address: str, store: Store, width: int, scheme: str) -> None:
    uid = store.sql("select uid from samples where interruptions > 0 limit 1")["uid"][0].as_py()
    of_one = (f"sample/{uid}", f"life/{uid}", "prompt/chain_sum-train-0", "step/student?n=2&ranks=2")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(address)
    for view in ("samples", "run", "teachers", "compare", "sql", *of_one):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        ready(page)
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{view} is wider than the window"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    context.close()


def test_hostile_names_and_texts_are_text_on_every_page(browser: Browser, tmp_path: Path) -> None:
    store = make_hostile(tmp_path / "hostile")
    uid, word = (store.sql(f"select uid from samples where {which}")["uid"][0].as_py() for which in (
        "prompt_id like '%1' and iteration = 1", "prompt_id like '%0' and iteration = 0"
    ))  # fmt: skip
    quoted, steering = (
        quote(NAME, safe=""),
        re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]"),
    )
    pages = {
        "samples": 6, "run": 1, "teachers": 2, "compare": 3, "sql": 1, f"sample/{uid}": 3, f"sample/{word}": 3,
        f"life/{uid}": 4, f"prompt/{quoted}0": 2, f"prompt/{quoted}1": 2, f"step/{quoted}?n=1": 1,
    }  # fmt: skip
    with viewing(store.uri) as address, opened(browser, address, []) as page:
        for view, names in pages.items():
            page.goto(page.url.split("#")[0] + f"#/{view}")
            ready(page)
            expect(page.locator("main")).to_contain_text(visible(NAME)[:12])
            text = page.locator("main").inner_text() + page.title()
            assert text.count(visible(NAME)[:12]) >= names, f"{view} shows names as text"
            assert steering.findall(text) == [], f"{view} lets through what reorders or steers"
            assert page.locator("img, script:not([src])").count() == 0, f"{view} has markup of a model"
            assert page.evaluate("document.documentElement.scrollWidth") <= 1400, f"{view} is wider than the window"


def test_an_export_opens_from_disk(browser: Browser, store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mopd_dataplane", "view", store.uri, "--export"]
    subprocess.run(
        [*command, tmp_path / "out", "--where", "teachers = 3"], check=True, timeout=300, stdout=subprocess.DEVNULL
    )
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*"))
    assert written < 16 / 200 * 20e6, "of 16 samples; the 200 that an export takes unless told stay below 20 MB"
    uid = store.sql("select uid from samples where interruptions > 0 and domain = 'chain_sum' limit 1")["uid"][
        0
    ].as_py()
    subprocess.run(
        [*command, tmp_path / "one.html", "--sample", uid], check=True, timeout=300, stdout=subprocess.DEVNULL
    )
    context = browser.new_context()
    page = context.new_page()
    trouble: list[str] = []
    requested_urls: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error.stack)))
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    expect(page.locator("#matching")).to_contain_text("16 of 16")
    page.locator("#h-reward-0").click()
    expect(page.locator("#matching")).not_to_contain_text("16 of 16")
    ready(page)
    page.keyboard.press("Enter")
    expect(page.locator(".strip .t").first).to_be_visible()
    page.keyboard.press("2")
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.goto((tmp_path / "one.html").as_uri())
    expect(page.locator(".strip .t").first).to_be_visible()
    expect(page.locator(".tracks li")).to_have_count(4)
    context.close()
    assert trouble == []
    assert all(url.startswith(("file:", "data:")) for url in requested_urls)


def test_every_page_shows_its_sql_and_the_packs_their_ranks(page: Page) -> None:
    open_scored(page)
    page.locator(".strip #t1").click()
    expect(page.locator(".card .beside small").first).to_contain_text("not in the store")
    for view in ("life", "run", "teachers", "compare", "prompt"):
        if view == "life":
            page.keyboard.press("i")
        elif view == "prompt":
            page.go_back()
            page.goto(page.url.split("#")[0] + "#/prompt/chain_sum-train-0")
        else:
            page.goto(page.url.split("#")[0] + f"#/{view}")
        ready(page)
        page.get_by_text("SQL and curl of this page").click()
        expect(page.locator(".sources .sql").first).to_contain_text("select")
    page.get_by_role("button", name="edit as a query").first.click()
    expect(page.locator(".status")).to_contain_text("rows")
    page.goto(page.url.split("#")[0] + "#/step/student?n=2&ranks=2&by=teacher")
    expect(page.locator(".ranks .pack-row")).to_have_count(2)
    page.get_by_label("coloured by").select_option("trained")
    expect(page.locator(".keyed li")).to_have_count(5)


def test_curves_can_be_smoothed(browser: Browser, store: Store) -> None:
    with viewing(str(store.uri)) as address, opened(browser, f"{address}#/run", []) as page:
        chart = page.locator(".chart canvas").first
        expect(chart).to_be_visible()
        page.wait_for_timeout(300)
        before = chart.evaluate("canvas => canvas.toDataURL()")
        page.get_by_label("smooth", exact=True).select_option("3")
        ready(page)
        expect(chart).to_be_visible()
        page.wait_for_timeout(300)
        assert "smooth=3" in page.url
        assert chart.evaluate("canvas => canvas.toDataURL()") != before
