"""The page of text: what a person must find on it, and that nothing of it is garbled."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.diagnose.finding import Accounting, Advice, Binding, Diagnosis, RankRow, Severity, Skipped
from perfdoctor.record.capture import Frame, Note, Overhead, Site
from perfdoctor.report.html import render_html
from perfdoctor.report.lines import cut, wrapped
from perfdoctor.report.page import Report
from perfdoctor.report.shares import shares
from perfdoctor.report.text import WIDTH, render_text

ROOT = "/home/ann/run"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def test_page_leads_with_what_binds_the_loop_and_what_comes_back(diagnosis: Diagnosis) -> None:
    page = render_text(diagnosis, root=ROOT)
    head = " ".join(page.split("\n\n")[1].split())
    assert "Host and GPU wait for each other" in head
    assert "The GPU idles 36 % of each step." in head  # 9 of 25 ms
    assert "host-sync alone would give back 5.4 of 25.2 ms a step: 5.1 h of a 24 h run." in head


def test_first_finding_shows_place_source_and_the_three_numbers_apart(diagnosis: Diagnosis) -> None:
    page = render_text(diagnosis, root=ROOT)
    assert "1  train.py:84   running_loss += loss.item()" in page
    assert "(4 a step, 1 a micro-batch)" in page
    assert "5.4 of 25.2 ms a step (4.9 to 6.0 ms), 21 %, 5.1 h of a 24 h run" in page
    assert "host blocked 12.3 ms, GPU idle because of it 5.6 ms" in page
    assert "prepared the next batch for 5.2 ms" in page


def test_lines_to_paste_keep_their_indentation(diagnosis: Diagnosis) -> None:
    lines = render_text(diagnosis).splitlines()
    first, second = (next(line for line in lines if text in line) for text in ("if step %", "print(running_loss"))
    assert second.index("print") - first.index("if") == 4


def test_fourth_finding_is_short_and_minor_ones_are_one_line(diagnosis: Diagnosis) -> None:
    page = render_text(diagnosis, root=ROOT)
    fourth = page[page.index("4  train.py:90") : page.index("Leave alone")]
    assert len(fourth.strip().splitlines()) <= 4
    assert "0.60 of 25.2 ms, 2 %" in fourth
    leave = page[page.index("Leave alone") : page.index("Where a step goes")].strip().splitlines()
    assert leave[1:] == ["   train.py:102  host-sync: reads a device value, 0.1 a step"]


def test_where_a_step_goes_adds_up(diagnosis: Diagnosis) -> None:
    page = render_text(diagnosis)
    table = page[page.index("Where a step goes") :].split("\n\n")[0].splitlines()[1:]
    assert sum(float(re.search(r"([\d.]+) ms", row)[1]) for row in table) == pytest.approx(25.0)  # type: ignore[index]
    assert sum(int(re.search(r"(\d+) %", row)[1]) for row in table) == 100  # type: ignore[index]


@given(st.lists(st.integers(0, 10**9), min_size=5, max_size=5), st.dictionaries(st.text(), st.integers(1, 10**9)))
def test_shares_add_up_to_the_window(busy: list[int], idle: dict[str, int]) -> None:
    matrix, bandwidth, copy, communication = busy[:4]  # the fifth are kernels of no class
    accounting = Accounting(
        window_ns=sum(busy) + sum(idle.values()) + 7,
        busy_ns=sum(busy),
        matrix_ns=matrix,
        bandwidth_ns=bandwidth,
        copy_ns=copy,
        communication_ns=communication,
        idle_by_code=idle,
        unexplained_ns=7,
    )
    assert sum(row.time_ns for row in shares(accounting)) == accounting.window_ns


@pytest.mark.parametrize("width", [60, 80, 96, 120])
def test_no_line_is_wider_than_the_page(diagnosis: Diagnosis, width: int) -> None:
    paste = {line.strip() for f in diagnosis.findings if f.advice for line in f.advice.lines}
    for line in render_text(diagnosis, width=width, root=ROOT).splitlines():
        assert len(line) <= width or line.strip() in paste


def test_coloured_page_is_the_plain_page_with_colours(diagnosis: Diagnosis) -> None:
    coloured = render_text(diagnosis, colour=True, root=ROOT)
    assert ANSI.search(coloured)
    stripped = [line.rstrip() for line in ANSI.sub("", coloured).splitlines()]
    assert stripped == render_text(diagnosis, root=ROOT).splitlines()


def test_plain_page_has_no_control_characters(diagnosis: Diagnosis) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", render_text(diagnosis))


def test_a_loop_that_was_not_timed_is_never_called_healthy(diagnosis: Diagnosis) -> None:
    empty = Diagnosis(source="t.json", step=None, accounting=None, binding=Binding.UNKNOWN, findings=(), leave_alone=())
    page = " ".join(render_text(empty).split())
    assert "could not be told" in page
    assert "nothing here says that the loop is healthy" in page
    timed = replace(diagnosis, findings=())
    assert "Nothing was found that would give back 1 %" in render_text(timed)


def test_a_reason_that_several_findings_share_is_said_once(diagnosis: Diagnosis) -> None:
    reason = "there is no GPU here, so no milliseconds"
    findings = tuple(replace(f, headroom=None, withheld=reason) for f in diagnosis.findings)
    page = render_text(replace(diagnosis, findings=findings, accounting=None))
    assert page.count(reason) == 1
    single = replace(diagnosis, findings=(findings[0], *diagnosis.findings[1:]))
    assert f"withheld: {reason}" in render_text(single)


def test_errors_say_that_results_may_be_wrong(diagnosis: Diagnosis) -> None:
    wrong = replace(diagnosis.findings[0], severity=Severity.ERROR, code="unsynchronised-read")
    assert "ERROR, results may be wrong. unsynchronised-read" in render_text(replace(diagnosis, findings=(wrong,)))


def test_library_calls_name_both_lines_and_inexact_sites_say_so(diagnosis: Diagnosis) -> None:
    site = Site(
        frame=Frame(file="/home/ann/run/train.py", line=7, function="fit"),
        library=Frame(file="/x/site-packages/torch/nn/utils/clip_grad.py", line=88, function="clip", owner="torch"),
        text="clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
        exact=False,
    )
    page = render_text(replace(diagnosis, findings=(replace(diagnosis.findings[0], site=site),)), root=ROOT)
    assert "train.py:7 (where fit begins, not the call)" in page
    assert "inside torch, torch/nn/utils/clip_grad.py:88" in page


def test_ranks_are_a_table(diagnosis: Diagnosis, rank_rows: tuple) -> None:  # type: ignore[type-arg]
    lines = render_text(replace(diagnosis, ranks=rank_rows)).splitlines()
    head = next(i for i, line in enumerate(lines) if "exposed communication" in line)
    row = lines[head + 2]
    assert row.split() == ["1", "31.0", "ms", "90", "%", "0", "ms", "slowest"]


def test_long_source_text_is_cut_and_long_words_are_not_broken() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"
    path = "/very/long/" + "x" * WIDTH
    assert any(path in line[1][0] for line in wrapped(f"see {path} there", 60))


def titled(diagnosis: Diagnosis) -> str:
    return " ".join(render_text(diagnosis).partition("Where ")[2].partition(" busy: ")[0].split())


def test_where_a_step_goes_says_whose_steps_they_are(diagnosis: Diagnosis) -> None:
    """The parts are of the recorded steps: 25 ms is the bare 25.2 ms, 40 ms is not, and neither is a slowed step."""
    assert diagnosis.accounting is not None
    assert diagnosis.step is not None
    assert titled(diagnosis) == "a step goes: 25.0 ms on the GPU's timeline, mean"
    slowed = replace(
        diagnosis, accounting=replace(diagnosis.accounting, window_ns=40_000_000, unexplained_ns=17_000_000)
    )
    assert titled(slowed).endswith(
        "40.0 ms on the GPU's timeline, mean; the recorder slowed its launches and calls, the bare step takes 25.2 ms"
    )
    assert titled(slowed).startswith("a recorded step goes")
    assert "The GPU idles 60 % of each recorded step." in " ".join(render_text(slowed).split())  # 24 of 40 ms
    traced = replace(slowed, step=replace(diagnosis.step, basis="recorded steps, slowed by the recorder"))
    assert "of each step." in " ".join(render_text(traced).split())  # the step above is the recorded one
    assert titled(traced).endswith("40.0 ms on the GPU's timeline, mean, slowed by the recorder (median step 25.2 ms)")


def test_a_recording_without_steps_is_never_called_a_step(diagnosis: Diagnosis) -> None:
    assert diagnosis.step is not None
    step = replace(diagnosis.step, num_steps=0, basis="the whole of it: it marks no steps")
    page = render_text(replace(diagnosis, step=step, steps_per_s=None, samples_per_s=None))
    own = [line for line in page.splitlines() if "steps" not in line]  # remarks and advice speak of steps in general
    assert not re.search(r"a step|each step|of a 24 h run", "\n".join(own))
    assert "recording       25.2 ms (the whole of it: it marks no steps)" in page
    assert "5.4 of 25.2 ms in all (4.9 to 6.0 ms), 21 %" in page
    assert "(4 in all)" in page


def test_one_step_is_singular(diagnosis: Diagnosis) -> None:
    assert diagnosis.step is not None
    step = replace(diagnosis.step, num_steps=1, basis="recorded steps, slowed by the recorder")
    assert "25.2 ms (1 recorded step, slowed by the recorder)" in render_text(replace(diagnosis, step=step))


def test_nothing_found_where_nothing_could_be_priced_is_no_good_news(diagnosis: Diagnosis) -> None:
    skipped = (Skipped(check="what would come back", why="the replay gives 30 % of the recorded step"),)
    page = render_text(replace(diagnosis, findings=(), leave_alone=(), skipped=skipped))
    assert "Nothing was found that would give back" not in page
    assert "could not be judged" in page


def test_ranks_without_a_device_show_no_zeros(diagnosis: Diagnosis) -> None:
    row = RankRow(rank=1, path="", step_ns=None, busy_ratio=None, exposed_communication_ns=None, note="never trained")
    text = render_text(replace(diagnosis, ranks=(row,)))
    line = next(line for line in text.splitlines() if "never trained" in line)
    assert line.split() == ["1", "-", "-", "-", "never", "trained"]


def loop_with_its_reads(diagnosis: Diagnosis) -> Diagnosis:
    """The fixture's page led by a loop over tensors, whose reads were found at its line too."""
    read = diagnosis.findings[0]
    loop = replace(
        read, code="gradient-loop", title="a norm for each tensor: 149 launches and 149 reads for 149 tensors", count=1,
        count_per_micro_batch=None, advice=Advice(text="one multi-tensor norm"),
    )  # fmt: skip
    reads = replace(read, severity=Severity.INFO, count=149, count_per_micro_batch=None, part_of="gradient-loop")
    return replace(diagnosis, findings=(loop, *diagnosis.findings[1:], reads))


@pytest.mark.parametrize("render", [render_text, render_html])
def test_one_line_that_one_edit_cures_is_one_finding(diagnosis: Diagnosis, render: Callable[..., str]) -> None:
    page = render(loop_with_its_reads(diagnosis), root=ROOT)
    assert page.count("train.py:84") == 1
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "149 launches and 149 reads for 149 tensors (1 loop a step)" in text
    assert "cured with it host-sync: reads a device value, 149 a step; alone 5.4 of 25.2 ms, 21 %" in text
    assert not re.search(r"(?m)^5  ", page)  # five findings, four places to change


def test_two_findings_of_a_line_with_the_same_advice_are_one_place(diagnosis: Diagnosis) -> None:
    read = diagnosis.findings[0]
    shown = replace(read, kind="format_tensor", title="formats a device tensor into text", count=2)
    page = render_text(replace(diagnosis, findings=(read, shown)), root=ROOT)
    assert page.count("train.py:84") == 1
    assert "cured with it   host-sync: formats a device tensor into text, 2 a step" in page


def test_what_another_edit_cures_keeps_its_own_place(diagnosis: Diagnosis) -> None:
    read, copy = diagnosis.findings[:2]
    other = replace(copy, site=read.site)
    wrong = replace(read, severity=Severity.ERROR)  # said in full, whatever cures it
    page = render_text(replace(diagnosis, findings=(read, other, wrong)), root=ROOT)
    assert page.count("train.py:84") == 3
    assert "cured with it" not in page


def test_both_rates_rest_on_the_mean_step_and_say_so(diagnosis: Diagnosis) -> None:
    page = render_text(replace(diagnosis, steps_per_s=31.45, samples_per_s=503.2, samples_per_step=16.0))
    assert "31.4 steps/s, 503 samples/s (mean step of 31.8 ms, 16 samples a step)" in page
    page = render_text(replace(diagnosis, steps_per_s=2.0, samples_per_s=2.0, samples_per_step=1.0))
    assert "2 steps/s, 2 samples/s (mean step of 500 ms, 1 sample a step)" in page
    assert "throughput" not in render_text(replace(diagnosis, steps_per_s=None, samples_per_s=None))


def test_the_command_to_try_is_on_the_page_of_text_and_of_html(diagnosis: Diagnosis) -> None:
    command = "perfdoctor trial --treat=device_metrics SCRIPT.py"
    assert f"try             {command}" in render_text(diagnosis)
    assert f"<dt>try</dt><dd><code>{command}</code></dd>" in render_html(diagnosis)
    emulated = replace(diagnosis, notes=(Note(code="emulated-device", text="emulated"),))
    command = "perfdoctor trial --treat=device_metrics train.py"
    assert f"try on a GPU    {command}\n" in render_text(emulated, script="train.py")
    assert f"<dt>try on a GPU</dt><dd><code>{command}</code></dd>" in render_html(emulated, script="train.py")


@pytest.mark.parametrize(
    "words",
    [
        ["my dir/train it.py", "--name", "a b", "--note=it's $HOME & more", "*.pt"],
        ["-m", "package.train", "--steps", "9"],
        ["train.py", *(f"--option-{i}=value" for i in range(12))],
    ],
)
def test_the_command_to_try_is_what_a_shell_takes_for_the_script_and_its_arguments(
    diagnosis: Diagnosis, words: list[str]
) -> None:
    page = render_text(Report.of(diagnosis), script=shlex.join(words), root=ROOT)
    rows = page[page.index("   try  ") :].split("\n   basis")[0].removeprefix("   try")
    assert max(map(len, rows.splitlines())) <= 96
    shell = f"perfdoctor() {{ printf '%s\\n' \"$@\"; }}\n{rows}"  # a real one reads it as it is pasted
    read = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert read == ["trial", "--treat=log_every_n", *words]


def test_a_step_that_nobody_gives_as_a_function_is_not_offered_to_a_trial(diagnosis: Diagnosis) -> None:
    launch = replace(diagnosis.findings[2], treatments=("graphed_step",))
    assert "trial --treat" not in render_text(replace(diagnosis, findings=(launch,)))


def test_a_loop_that_watches_itself_is_told_what_the_commands_stand_for(diagnosis: Diagnosis) -> None:
    for source, told in (("session", True), ("window at step 40", True), ("train.py", False)):
        for render in (render_text, render_html):
            page = " ".join(render(replace(diagnosis, source=source)).split())
            assert ("stands for the script without its own session" in page) == told


def test_no_price_is_claimed_for_what_to_leave_alone_where_no_gpu_was_recorded(diagnosis: Diagnosis) -> None:
    assert "Leave alone: each would give back under 1 %" in render_text(diagnosis)
    unpriced = replace(diagnosis, accounting=None)
    for page in (render_text(unpriced), render_html(unpriced)):
        assert "Leave alone: each comes in less than half of the steps" in page
        assert "under 1 %" not in page


def test_what_comes_in_few_steps_is_counted_on_average(diagnosis: Diagnosis) -> None:
    """Sixteen reads in every eighth step are two a step: not "1 a step" beside "in few steps"."""
    burst = replace(diagnosis.leave_alone[0], count=2.0, count_per_micro_batch=0.5)
    page = render_text(replace(diagnosis, accounting=None, leave_alone=(burst,)))
    assert "host-sync: reads a device value, 2 a step on average\n" in page
    priced = render_text(replace(diagnosis, leave_alone=(burst,)))
    assert "reads a device value, 2 a step, 0.5 a micro-batch\n" in priced


def test_watching_that_seems_to_speed_the_loop_up_is_called_noise(diagnosis: Diagnosis) -> None:
    faster = Overhead(phase="sites", ratio=-0.95, low=-0.97, high=-0.8)
    page = " ".join(render_text(replace(diagnosis, overheads=(faster,))).split())
    assert "call-site hooks -95.0 % (-97.0 % to -80.0 %; nothing gets faster by it" in page
    unsure = replace(faster, high=0.01)
    assert "nothing gets faster" not in render_text(replace(diagnosis, overheads=(unsure,)))
