"""The lines to keep several treatments: those of one call are one line."""

from __future__ import annotations

import pytest

from perfdoctor.treat.kept_lines import merged


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ((), ()),
        (("gc.freeze()", "gc.freeze()"), ("gc.freeze()",)),
        (
            (
                "loader = DataLoader(..., persistent_workers=True)",
                "gc.collect(); gc.freeze()   # once",
                "loader = DataLoader(..., num_workers=4, persistent_workers=True)   # 8 CPUs here",
                "loader = DataLoader(..., pin_memory=True)",
                "x = x.to(device, non_blocking=True)",
            ),
            (
                "loader = DataLoader(..., persistent_workers=True, num_workers=4, pin_memory=True)   # 8 CPUs here",
                "gc.collect(); gc.freeze()   # once",
                "x = x.to(device, non_blocking=True)",
            ),
        ),
        (
            ("a = torch.optim.AdamW(..., fused=True)", "b = torch.optim.AdamW(..., fused=True)"),
            ("a = torch.optim.AdamW(..., fused=True)", "b = torch.optim.AdamW(..., fused=True)"),
        ),
    ],
    ids=["none", "twice", "one call", "two calls"],
)
def test_lines_of_one_call_become_one(lines: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    assert merged(lines) == wanted
