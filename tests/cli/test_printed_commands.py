"""Commands that a page prints: read back, they name the same script, arguments and options."""

from __future__ import annotations

import shlex

import pytest

from perfdoctor.cli.nsys import script_of
from perfdoctor.cli.run import split_command
from perfdoctor.cli.trial import _command_line, _parser

SCRIPTS = [
    ["my dir/train it.py", "--name", "a b", "--note=it's $HOME"],
    ["-m", "package.train", "--steps", "9"],
    ["train.py"],
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("own", [[], ["--warmup", "2", "--active", "3", "--device", "emulated"]])
def test_the_command_that_goes_on_is_the_one_that_was_given(own: list[str], script: list[str]) -> None:
    command = split_command(["--treat", *own, *script])
    options = _parser().parse_args(command.own)
    words = shlex.split(_command_line(command, options, ("tf32", "compile"), 60.0))
    again = split_command(words[2:])
    assert words[:2] == ["perfdoctor", "trial"]
    assert (again.target, again.module, again.arguments) == (command.target, command.module, command.arguments)
    found = _parser().parse_args(again.own)
    assert (found.treat, found.seconds) == (("tf32", "compile"), 60.0)
    assert (found.warmup, found.active, found.device) == (options.warmup, options.active, options.device)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_typed_as_it_was_given(script: list[str]) -> None:
    assert shlex.split(split_command(script).typed) == script


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["python", "my dir/train.py", "-x"], "'my dir/train.py' -x"),
        (["/usr/bin/python3.12", "-m", "package", "-x"], "-m package -x"),
        (["python", "-u", "train.py"], ""),  # an option of python's: none of perfdoctor's
        (["torchrun", "--nproc-per-node", "2", "train.py"], ""),
        (["python", "-m", "torch.distributed.run", "train.py"], ""),
        (["python", "train.py", "torch.distributed.run"], "train.py torch.distributed.run"),
        (["python"], ""),
    ],
)
def test_the_script_of_a_command_that_nsys_recorded(words: list[str], typed: str) -> None:
    assert script_of(words) == typed
