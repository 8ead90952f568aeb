"""The report: right numbers, one file, nothing from outside, nothing a model wrote can become markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mopd_dataplane import Prompt, Store, create_store
from mopd_dataplane.query import report as report_module
from mopd_dataplane.query import show as show_module
from mopd_dataplane.query.measures import Measures, from_the_start, measure, recovery
from mopd_dataplane.query.plots import MOST_SERIES, Line, bars, histogram, line_plot
from mopd_dataplane.query.report import write_report
from mopd_dataplane.query.run_sections import run_sections
from mopd_dataplane.query.sections import sections

DOMAINS = ("chain_sum", "number_sorting", "spell_backward")


@pytest.fixture(scope="module")
def measures(demo_store: Store) -> Measures:
    return measure(demo_store)


@pytest.fixture(scope="module")
def page(demo_store: Store, measures: Measures, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(demo_store, tmp_path_factory.mktemp("report") / "r.html", measures=measures).read_text()


class Outline(HTMLParser):
    """Tags, ids and attributes of a page; complains about tags that do not close."""

    VOID = frozenset({"meta", "input", "path", "use", "rect", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_accuracy_and_recovery_are_those_of_the_tables(demo_store: Store, measures: Measures) -> None:
    rows = demo_store.table("evals").to_pylist()

    def mean(policy: str, version: int, domain: str, of: str = "correct") -> float:
        own = [r[of] for r in rows if (r["policy"], r["policy_version"], r["domain"]) == (policy, version, domain)]
        return float(sum(own) / len(own))

    for row in measures.accuracy:
        key = row["policy"], row["policy_version"], row["domain"]
        assert row["accuracy"] == mean(*key)
        assert row["reward"] == mean(*key, of="reward") > row["accuracy"] - 1e-9
        assert row["low"] <= row["accuracy"] <= row["high"]
    recoveries = {row["domain"]: row for row in recovery(measures)}
    assert list(recoveries) == [*sorted(DOMAINS), "mean"]
    gains = []
    for domain in DOMAINS:
        base, teacher = mean("base", 1, domain), mean(f"sft-{domain}", 1, domain)
        gains.append((mean("student", 4, domain) - base, teacher - base))
        assert recoveries[domain]["recovery"] == pytest.approx(gains[-1][0] / gains[-1][1])
        assert recoveries[domain]["teacher"] == f"{domain}-expert"
        assert (recoveries[domain]["base"], recoveries[domain]["warning"]) == ("base", "")
    assert recoveries["mean"]["recovery"] == pytest.approx(
        sum(gain for gain, _ in gains) / sum(lead for _, lead in gains)
    )


def test_partial_credit_is_never_called_accuracy(measures: Measures, page: str) -> None:
    """The store pays every wrong answer half: what is shown as accuracy knows nothing of it."""
    section = next(section for section in sections(measures) if section.key == "accuracy")
    accuracy, _, reward = section.grids
    base = [row["policy"] for row in measures.accuracy].index("base") // len(DOMAINS) + 1
    assert accuracy.rows[0][base].text.startswith("25.0 %")
    assert reward.rows[0][base].text.startswith("0.625")
    assert "Mean reward" in reward.caption
    assert "partial credit" in reward.caption


@pytest.mark.slow
def test_a_student_that_learnt_nothing_recovers_nothing_and_a_teacher_without_a_lead_has_none_to_give(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = make_store(tmp_path / "store", prompts=8)
    ids = {d: [p.prompt_id for p in store.prompts(split="eval", domains=[d])] for d in DOMAINS}

    def answers(policy: str, version: int, right: dict[str, int]) -> None:
        store.add_evals(
            {"policy": policy, "policy_version": version, "prompt_id": name, "domain": domain, "reward": 1.0,
             "correct": index < right[domain], "response": "x", "response_len": 1, "finish_reason": "stop"}
            for domain, names in ids.items() for index, name in enumerate(names)
        )  # fmt: skip

    answers("base", 9, {"chain_sum": 2, "number_sorting": 7, "spell_backward": 2})
    answers("student", 9, {"chain_sum": 2, "number_sorting": 7, "spell_backward": 2})
    answers("sft-number_sorting", 9, {"chain_sum": 2, "number_sorting": 8, "spell_backward": 2})
    recoveries = {row["domain"]: row for row in recovery(measure(store))}
    assert recoveries["chain_sum"]["recovery"] == recoveries["mean"]["recovery"] == 0.0
    assert recoveries["number_sorting"]["recovery"] is None
    assert "nothing to recover" in recoveries["number_sorting"]["warning"]
    section = next(section for section in sections(measure(store)) if section.key == "accuracy")
    assert "number_sorting: – because the teacher's lead over the base" in section.grids[1].caption


@pytest.mark.slow
def test_one_reason_for_several_domains_is_said_once(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=8)
    store.add_evals(
        {"policy": policy, "policy_version": 9, "prompt_id": prompt.prompt_id, "domain": prompt.domain, "reward": 0.0,
         "correct": False, "response": "x", "response_len": 1, "finish_reason": "stop"}
        for policy in ("base", "student", *(f"sft-{domain}" for domain in DOMAINS))
        for prompt in store.prompts(split="eval")
    )  # fmt: skip
    measures = measure(store)
    assert all(row["warning"] for row in recovery(measures))
    section = next(section for section in sections(measures) if section.key == "accuracy")
    caption = section.grids[1].caption
    assert caption.count("nothing to recover") == 1
    assert f"student, {', '.join(DOMAINS)}, mean: – because" in caption


@pytest.mark.slow
def test_a_reward_that_is_no_verifier_has_no_accuracy(make_store: Callable[..., Store], tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", prompts=2)
    prompt = Prompt(prompt_id="style-eval-0", domain="style", text="write", answer="", split="eval")
    store.add_prompts([prompt])
    store.add_evals([
        {"policy": "base", "policy_version": 1, "prompt_id": prompt.prompt_id, "domain": "style", "reward": 0.97,
         "response": "x", "response_len": 1, "finish_reason": "stop"}
    ])  # fmt: skip
    measures = measure(store)
    row = next(row for row in measures.accuracy if row["domain"] == "style")
    assert (row["accuracy"], row["reward"]) == (None, pytest.approx(0.97))
    accuracy, *_, reward = next(section for section in sections(measures) if section.key == "accuracy").grids
    shown = {row[0].text: {cell.text for cell in row[1:]} for row in accuracy.rows}
    assert shown["style"] == {"–"}
    assert any(cell.text.startswith("0.970") for row in reward.rows if row[0].text == "style" for cell in row)


def test_figures_are_of_the_evaluation_split_as_soon_as_there_is_one(
    make_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = create_store(str(tmp_path / "tuned"))
    for split, right in (("tune", True), ("eval", False)):
        prompt = Prompt(prompt_id=f"d-{split}-0", domain="d", text=split, answer="", split=split)
        store.add_prompts([prompt])
        store.add_evals([
            {"policy": "p", "policy_version": 1, "prompt_id": prompt.prompt_id, "domain": "d", "reward": 1.0,
             "correct": right, "response": "x", "response_len": 1, "finish_reason": "stop"}
        ])  # fmt: skip
        split_measures = measure(store)
        assert (split_measures.held_out.split, split_measures.accuracy[0]["accuracy"]) == (split, float(right))
        text = sections(split_measures)[0].text
        assert ("tuning prompts" in text) == (split == "tune")


def test_learning_curve_starts_where_the_stage_starts(measures: Measures) -> None:
    rows = [row for row in measures.accuracy_by_version if row["domain"] == "chain_sum"]
    student = [(row["policy_version"], row["accuracy"]) for row in rows if row["policy"] == "student"]
    assert [version for version, _ in student] == [0, 1, 2, 3, 4]
    assert student[0][1] == 0.25
    assert [row["policy_version"] for row in rows if row["policy"] == "base"] == [1]


def test_start_is_the_newest_version_of_the_policy_a_stage_starts_from() -> None:
    rows = [
        {"policy": name, "policy_version": version} for version in (0, 1, 2) for name in ("init", "base", "student")
    ]
    rows = [
        row for row in rows if (row["policy"], row["policy_version"]) not in (("init", 1), ("init", 2), ("student", 0))
    ]
    stage_rows = from_the_start(rows, {"base": "init", "student": "base"})
    assert [row["policy_version"] for row in stage_rows if row["policy"] == "student"] == [0, 1, 2]
    assert [row["policy_version"] for row in stage_rows if row["policy"] == "base"] == [0, 1, 2]
    assert "init" not in {row["policy"] for row in stage_rows}
    assert [row["policy_version"] for row in from_the_start(rows, {}) if row["policy"] == "student"] == [1, 2]


def test_reverse_kl_is_weighted_by_tokens(demo_store: Store, measures: Measures) -> None:
    first = next(row for row in measures.teacher_kl if row["teacher"] == "chain_sum-expert" and row["iteration"] == 0)
    samples = {row["uid"]: row for row in demo_store.samples().to_pylist()}
    total = weight = 0.0
    for score in demo_store.table("scores", filter="teacher = 'chain_sum-expert' and kind = 'logprob'").to_pylist():
        sample = samples[score["uid"]]
        if sample["iteration"] == 0:
            total += score["mean_reverse_kl"] * sample["loss_tokens"]
            weight += sample["loss_tokens"]
    assert first["reverse_kl"] == pytest.approx(total / weight, rel=1e-5)
    assert first["tokens"] == weight


def test_lengths_times_and_cost_add_up(demo_store: Store, measures: Measures) -> None:
    assert sum(row["samples"] for row in measures.lengths) == 96
    assert {row["action"]: row["seconds"] for row in measures.times} == {
        "rollout": 124.0, "score": 50.0, "plan": pytest.approx(0.8), "train": 88.0,
    }  # fmt: skip
    scores = demo_store.table("scores").to_pylist()
    for row in measures.cost:
        own = [score for score in scores if score["kind"] == row["kind"]]
        assert row["bytes_per_token"] == sum(s["bytes"] for s in own) / sum(s["rows"] for s in own)


def test_page_is_well_formed_and_has_every_section(page: str, measures: Measures) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids), "ids of several plots must not collide"
    for section in sections(measures):
        assert section.key in outline.ids
        assert section.empty == ""
    links = [value for name, value in outline.attributes if name in ("href", "xlink:href")]
    assert links
    assert all(link.startswith("#") and link[1:] in outline.ids for link in links)


def test_page_needs_nothing_from_outside_and_runs_no_script(page: str) -> None:
    outline = Outline(page)
    assert set(outline.tags).isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form"})
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert not [value for name, value in outline.attributes if name in ("src", "srcset", "action")]
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_every_token_that_is_not_shown_is_counted(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of an answer of which only the beginning is read."""
    monkeypatch.setattr(report_module, "EXCERPT_TOKENS", 1)
    monkeypatch.setattr(show_module, "MOST_TOKENS", 2)
    page = Path(str(write_report(demo_store, tmp_path / "report.html"))).read_text()
    counts = re.findall(r"· (\d+) tokens, .*?</pre>.*?(\d+) more tokens", page, re.DOTALL)
    assert counts
    assert all(int(more) == int(tokens) - 1 for tokens, more in counts)


def test_model_text_stays_text(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "\x1b" not in page
    assert "␛[31mred␛[0m" in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "s"))
    name = "</title><script>$x_{1}$\x1b"
    store.add_evals([
        {"policy": name, "policy_version": v, "prompt_id": f"{v}", "domain": name, "reward": 1.0, "reverse_kl": 0.1,
         "response": name, "response_len": 3, "finish_reason": "stop"}
        for v in (1, 2)
    ])  # fmt: skip
    text = write_report(store, tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "\x1b" not in text
    assert "$x_{1}$␛" in text
    assert Outline(text).open == []


def test_empty_store_says_so_in_every_section(tmp_path: Path) -> None:
    store = create_store(str(tmp_path / "s"))
    parts = sections(measure(store))
    assert [part.key for part in parts if not part.empty] == ["store"]
    text = write_report(store, tmp_path / "r.html").read_text()
    assert "No training step is recorded." in text
    assert "No scored samples and no held-out answers to show." in text
    assert "<svg" not in text


@pytest.mark.slow
def test_fresh_data_gives_no_stale_plot(tmp_path: Path, make_store: Callable[..., Store]) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    fresh = measure(store)
    for row in fresh.steps:
        row["staleness_max"] = 0
    staleness = next(part for part in sections(fresh) if part.key == "staleness")
    assert staleness.plots == []
    assert "0 versions on every step" in staleness.text


@pytest.mark.slow
def test_report_is_read_at_one_snapshot(tmp_path: Path, make_store: Callable[..., Store]) -> None:
    store = make_store(tmp_path / "s", prompts=1)
    before = measure(store)
    store.add_event("late", "student", "stage_time", 9, 1000.0, {"action": "rollout"})
    assert before.snapshot.versions["events"] < store.snapshot().versions["events"]
    seconds = "select sum(value) as s from events where kind = 'stage_time'"
    assert store.sql(seconds, snapshot=before.snapshot)["s"][0].as_py() == pytest.approx(262.8)


def test_self_checks_and_the_worst_window_of_a_stage_are_shown(measures: Measures, page: str) -> None:
    exactness = next(part for part in run_sections(measures) if part.key == "exactness")
    checks, gaps = exactness.grids
    assert [[cell.text for cell in row][1:] for row in checks.rows] == [
        ["sampler", "Qwen3ForCausalLM (qwen3)", "float32", "–", "1.5e-07", "0.001"],
        ["teacher chain_sum-expert", "Qwen3ForCausalLM (qwen3)", "float32", "–", "2e-07", "0.001"],
        ["trainer", "Qwen3ForCausalLM (qwen3)", "float32", "1,048", "1e-07", "0.001"],
    ]
    worst = ["student", "hf, float32", "float32", "0", "0.012", "75.0 %", "0.004", "0.001"]
    assert [[cell.text for cell in row] for row in gaps.rows] == [worst]
    assert "3 self-checks passed. 1 of 2 windows began" in exactness.text
    assert "log-probs differ from the sampler&#39;s" in page


def test_a_store_without_self_checks_says_so(tmp_path: Path) -> None:
    exactness = next(
        part for part in run_sections(measure(create_store(str(tmp_path / "s")))) if part.key == "exactness"
    )
    assert exactness.empty == "No self-check is recorded."


def test_plots_are_svg_with_words_and_theme_colours() -> None:
    lines = [Line(name=f"n{i}", x=[0, 1], y=[0.1, None], level=0.5) for i in range(MOST_SERIES + 2)]
    plots = [
        line_plot("a", 'says "so" & more', lines, x="x", y="y", share=True),
        histogram("b", "alt", {"g": [(0.0, 3.0), (2.0, 1.0)]}, width=2, x="x", y="y"),
        bars("c", "alt", {"row": {"part": 2.0}, "none": {}}, labels={"row": "2", "none": "0"}),
    ]
    for plot in plots:
        tree = ElementTree.fromstring(plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
        assert tree.attrib["role"] == "img"
        title = tree[0]
        assert title.tag.endswith("title")
        assert title.attrib["id"] == tree.attrib["aria-labelledby"]
        assert tree.findall(".//{*}text"), "labels stay text"
        assert "var(--series-0)" in plot.svg
        assert "#0400" not in plot.svg
    assert plots[0].omitted == f"2 of {MOST_SERIES + 2} series do not fit and are left out."


def test_bold_is_explained_where_a_teacher_is_bold(measures: Measures, tmp_path: Path) -> None:
    """The demo's teachers were evaluated; a store of prompts and answers alone has no teacher."""

    def caption(shown: Measures) -> str:
        (section,) = [section for section in sections(shown) if section.key == "accuracy"]
        return section.grids[0].caption

    assert caption(measures) == "In bold: the domain's teacher."
    store = Store.create(tmp_path / "store")
    store.add_prompts([Prompt(prompt_id="a", domain="sums", text="1 + 1", answer="2", split="eval")])
    store.add_evals([
        {"policy": "base", "policy_version": 1, "prompt_id": "a", "domain": "sums", "reward": 1.0, "correct": True,
         "response": "2", "response_len": 1, "finish_reason": "stop"}
    ])  # fmt: skip
    assert caption(measure(store)) == ""
