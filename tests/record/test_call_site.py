"""Sites from real frames: the user's line, the library that made the call, the line that led there."""

import dataclasses
import io
import linecache
import logging
import subprocess
import sys
import textwrap
import threading

import pytest

from perfdoctor.record.call_site import HitLog, SiteTable, library_kind, user_frame
from perfdoctor.record.instruction import called_name, current_instruction
from perfdoctor.record.owners import file_owner, shown_file

TABLE = SiteTable()


def site():
    return TABLE.sites[TABLE.at(sys._getframe(1))]


def line_of(text):
    lines = linecache.getlines(__file__)
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_the_callers_line_is_named_and_the_next_line_outwards():
    def read():
        return site()  # the read

    found = read()
    assert found.frame.line == line_of("return site()  # the read")
    assert found.frame.function.endswith("read")
    assert found.frame.owner == "user"
    assert found.caller.line == line_of("found = read()")
    assert found.library is None
    assert found.text == "return site()  # the read"


def test_a_comprehension_is_one_line_not_its_own_caller():
    def read():
        return next(site() for _ in range(1))

    found = read()  # from here
    assert found.frame.line == line_of("return next(site() for _ in range(1))")
    assert found.caller.line == line_of("found = read()  # from here")


def test_two_calls_on_one_line_are_one_site_and_two_lines_are_two():
    table = SiteTable()
    one, two = table.at(sys._getframe()), table.at(sys._getframe())
    three = table.at(sys._getframe())
    assert one == two != three


def test_a_library_call_carries_the_users_line():
    class Handler(logging.Handler):
        def emit(self, record):
            self.found = TABLE.sites[TABLE.at(sys._getframe(1))]

    handler = Handler()
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("value")  # the log line
    assert handler.found.frame.line == line_of('logger.warning("value")  # the log line')
    assert handler.found.library.owner == "logger"
    assert handler.found.owner == "logger"


def test_the_same_library_line_from_two_user_lines_is_two_sites():
    class Text(io.StringIO):
        pass

    table = SiteTable()
    seen = []
    run = threading.Timer  # any Python code of the standard library that calls back
    timer = run(0, lambda: None)
    timer.function = lambda: seen.append(table.at(sys._getframe(1)))
    timer.run()
    timer.finished.clear()
    timer.run()
    assert seen[0] != seen[1]
    assert {table.sites[index].library.owner for index in seen} == {"python"}


def test_a_thread_without_user_frames_gives_the_innermost_line():
    found = []
    thread = threading.Thread(target=lambda: found.append(TABLE.sites[TABLE.at(sys._getframe(1))]))
    thread.start()
    thread.join()
    assert found[0].frame.owner == "python"
    assert found[0].library is None
    assert TABLE.sites[TABLE.at(None)].exact is False


def test_hits_carry_site_times_and_thread_and_listeners_may_raise():
    log = HitLog()
    log.add("item", sys._getframe(), 5, 7)
    (hit,) = log.hits
    assert (hit.kind, hit.start_ns, hit.end_ns, hit.thread) == ("item", 5, 7, threading.get_native_id())
    assert (
        log.sites.sites[hit.site].frame.function
        == test_hits_carry_site_times_and_thread_and_listeners_may_raise.__name__
    )

    def refuse(hit):
        raise RuntimeError(hit.kind)

    log.listeners.append(refuse)
    with pytest.raises(RuntimeError, match="cpu"):
        log.add("cpu", sys._getframe(), 1, 1)
    assert len(log.hits) == 2


def test_sites_from_many_threads_at_once_are_interned_once():
    table = SiteTable()

    def read():
        for _ in range(200):
            table.at(sys._getframe())

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table.sites) == 1


def run_source(source, tmp_path, **names):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(source))
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names


class Calls:
    """Notes the expression that is being executed in the caller, for every way Python has to call an object."""

    def __init__(self):
        self.seen = []

    def note(self, *args):
        self.seen.append(current_instruction(sys._getframe(1)).text)
        return self

    item = __getitem__ = __add__ = note


def test_the_exact_expression_is_told_apart_on_one_line(tmp_path):
    calls = Calls()
    run_source("a = [c.item(1), c.item(2)]; b = c[3]", tmp_path, c=calls)
    assert calls.seen == ["c.item(1)", "c.item(2)", "c[3]"]


def test_an_expression_over_several_lines_with_wide_characters(tmp_path):
    calls = Calls()
    run_source('x = "größe", c.item(\n    "ä",\n)', tmp_path, c=calls)
    assert calls.seen == ['c.item(\n    "ä",\n)']


def test_the_name_of_a_call_and_no_source(tmp_path):
    names = []
    space = run_source(
        "def f(): g.h()\n", tmp_path, g=type("G", (), {"h": lambda: names.append(called_name(sys._getframe(1)))})
    )
    space["f"]()
    exec("g()", {"g": lambda: names.append(called_name(sys._getframe(1)))})
    assert names == ["h", "g"]


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/env/lib/python3.12/site-packages/torch/_tensor.py", "torch"),
        ("/env/lib/python3.12/site-packages/torch/utils/tensorboard/writer.py", "logger"),
        ("/env/lib/python3.12/site-packages/pytorch_lightning/trainer/trainer.py", "lightning"),
        ("C:\\env\\Lib\\site-packages\\transformers\\trainer.py", "transformers"),
        ("/usr/lib/python3/dist-packages/torchmetrics/metric.py", "torchmetrics"),
        ("/env/lib/python3.12/site-packages/timm/layers/norm.py", "timm"),
        ("/tmp/torchinductor_me/ab/cab.py", "torch"),
        ("<eval_with_key>.3", "torch"),
        ("<frozen importlib._bootstrap>", "python"),
        (logging.__file__, "logger"),
        (threading.__file__, "python"),
        ("<string>", "user"),
        ("<stdin>", "user"),
        ("/home/me/torch_things/train.py", "user"),
        ("/tmp/ipykernel_12/3456.py", "user"),
    ],
)
def test_owners_by_path(file, owner):
    assert file_owner(file) == owner


def test_a_notebook_cell_is_known_by_its_number(monkeypatch):
    assert shown_file("<ipython-input-5-0a1b2c>") == "In[5]"
    assert shown_file("/tmp/ipykernel_12/3456.py") == "/tmp/ipykernel_12/3456.py"

    class Shell:
        class compile:
            _filename_map = {"/tmp/ipykernel_12/3456.py": 7}  # noqa: RUF012

    class IPython:
        get_ipython = staticmethod(Shell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert shown_file("/tmp/ipykernel_12/3456.py") == "In[7]"


def test_library_frames_say_what_was_asked_for(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    kinds = []
    item = torch.Tensor.item

    def read(tensor):
        kinds.append(library_kind(sys._getframe(1)))
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", read)
    value = torch.tensor(1.5)
    assert f"{value:.1f}" == "1.5"
    assert 1.5 in value
    value.item()
    assert kinds == ["format_tensor", "tensor_to_bool", None]
    kinds.clear()
    print(value)
    assert set(kinds) == {"print_tensor"}
    kinds.clear()
    repr(value)
    assert set(kinds) == {"format_tensor"}
    kinds.clear()
    logging.getLogger("perfdoctor.test").warning("loss %s", value)
    assert set(kinds) == {"logging"}


def test_lightning_s_backward_is_no_logging():
    pl = pytest.importorskip("pytorch_lightning")
    kinds = []

    class Loss:
        def backward(self):
            kinds.append(library_kind(sys._getframe(0).f_back))

    pl.LightningModule().backward(Loss())
    assert kinds == [None]


@dataclasses.dataclass
class Result:
    value: object
    note: str = ""


class Asking:
    """Asks for the site, and for what the frames imply, when it is turned into text."""

    def __repr__(self):
        self.site = TABLE.sites[TABLE.at(sys._getframe(1))]
        self.user = user_frame(sys._getframe(1))
        return "asked"


def test_what_python_generated_for_a_class_is_not_the_line():
    asked = Asking()
    str(Result(asked))  # shown here
    assert asked.site.frame.line == line_of("str(Result(asked))  # shown here")
    assert asked.site.text == "str(Result(asked))  # shown here"
    assert asked.user.f_code.co_filename == __file__


def test_code_from_exec_is_named_by_the_line_that_runs_it():
    names = {"site": site}
    exec("def read():\n    return site()", names)
    found = names["read"]()  # runs it
    assert found.frame.line == line_of('found = names["read"]()  # runs it')
    assert found.library is None


def test_where_all_of_a_program_came_from_exec_its_own_line_is_all_there_is():
    program = """
import sys
from perfdoctor.record.call_site import SiteTable
table = SiteTable()
def read():
    return table.sites[table.at(sys._getframe())]
found = read()
print(found.frame.file, found.frame.line, found.caller.line)
"""
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["<stdin>", "6", "7"]


def test_a_field_of_a_long_f_string_has_its_own_line():
    class Asked:
        def __format__(self, spec):
            self.site = site_above(sys._getframe(1))
            return "x"

    def site_above(frame):
        return TABLE.sites[TABLE.at(frame)]

    first, second, third = Asked(), Asked(), Asked()
    text = (
        f"one {first} "
        f"two {second:.3f} "  # the second field
        f"three {third!s}{third}"  # the third field
    )
    assert text.startswith("one x two x three")
    assert first.site.text.startswith('f"one')
    assert second.site.text.endswith("# the second field")
    assert third.site.text.endswith("# the third field")


def test_the_library_that_asked_is_the_cause():
    """torchmetrics asks torch for unique labels; a scheduler makes a number of its metric."""
    torch = pytest.importorskip("torch")
    kinds = []
    weight = torch.nn.Parameter(torch.ones(1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([weight], lr=0.1))

    class Metric:
        def __float__(self):
            kinds.append(library_kind(sys._getframe(1)))
            return 1.0

    scheduler.step(Metric())
    assert kinds == ["item"]
