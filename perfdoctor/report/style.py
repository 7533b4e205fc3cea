"""Colours and layout of the HTML report. Text takes its colour from the page, so dark notebooks stay readable.

Colours keep their contrast on white and on black: cool where the device ran, warm where it did not. One thing has one
colour, in the bar and in the picture of a step.
"""

MATRIX_COLOUR, BANDWIDTH_COLOUR, OTHER_COLOUR = "#2f7fd1", "#4fb3e8", "#9fc6e0"
COPY_COLOUR, COMMUNICATION_COLOUR = "#3fa7a0", "#7a72d8"
LAUNCH_COLOUR = "#5f9f4a"
WAIT_COLOUR = "#d9534f"  # for waits of the host alone
UNEXPLAINED_COLOUR = "#8d8d8d"
_IDLE_COLOURS = {
    "launch-bound": "#e07b39",
    "gradient-loop": "#e0b13c",
    "data-wait": "#b8577f",
    "host-sync": "#c98b5a",
    "kernel-gaps": "#a8852c",
    "launch-gaps": "#8a5a44",
    "pageable-copy": "#d98a9c",
    "blocking-copy": "#b39a6b",
    "allocator": "#6d5f8a",
    "garbage-collection": "#c46a9a",
    "worker-respawn": "#8f7f3a",
}
_UNUSUAL_IDLE_COLOUR = "#9c4f3d"


def idle_colour(code: str) -> str:
    """The colour of the idle time that a finding's code, or 'unexplained', claims."""
    return UNEXPLAINED_COLOUR if code == "unexplained" else _IDLE_COLOURS.get(code, _UNUSUAL_IDLE_COLOUR)


CSS = """
.perfdoctor-page{margin:0;padding:2rem 1rem;background:#fff;color:#1c1e21}
@media (prefers-color-scheme:dark){.perfdoctor-page{background:#15171a;color:#e4e6e9}}
.perfdoctor{max-width:56rem;margin:0 auto;font:15px/1.5 system-ui,sans-serif;color:inherit}
.perfdoctor h1{font-size:1.35rem;line-height:1.3;margin:.3rem 0}
.perfdoctor h2{font-size:1.02rem;margin:1.8rem 0 .5rem}
.perfdoctor h3{font:600 .98rem/1.4 ui-monospace,monospace;margin:0 0 .2rem;overflow-wrap:anywhere}
.perfdoctor p{margin:.25rem 0}
.perfdoctor .faint,.perfdoctor small{opacity:.68;font-size:.85rem}
.perfdoctor .figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));
gap:1rem 1.5rem;margin-top:1rem}
.perfdoctor .figures div{display:flex;flex-direction:column}
.perfdoctor .figures strong{font-size:1.5rem;line-height:1.2}
.perfdoctor svg{display:block;width:100%;height:36px;border-radius:5px}
.perfdoctor .timeline{margin-top:1.6rem;overflow-x:auto}
.perfdoctor .timeline svg{min-width:60rem;border-radius:0}
.perfdoctor-page .timeline{width:min(80rem,calc(100vw - 2rem - 15px));position:relative;left:50%;
transform:translateX(-50%)}
.perfdoctor .legend{list-style:none;padding:0;margin:.6rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.4rem}
.perfdoctor .legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin-right:.4rem}
.perfdoctor .card{border:1px solid rgba(128,128,128,.35);border-left:4px solid #e07b39;border-radius:6px;
padding:.7rem 1rem;margin:.7rem 0}
.perfdoctor .card.error{border-left-color:#d9534f}
.perfdoctor code,.perfdoctor pre{font:.88rem/1.5 ui-monospace,monospace;background:rgba(128,128,128,.14);
color:inherit;border-radius:4px}
.perfdoctor code{padding:.1rem .35rem;overflow-wrap:anywhere;white-space:pre-wrap}
.perfdoctor pre{padding:.6rem .8rem;overflow-x:auto;margin:.5rem 0}
.perfdoctor dl{display:grid;grid-template-columns:7rem 1fr;gap:.15rem .8rem;margin:.5rem 0}
.perfdoctor dt{opacity:.68}
.perfdoctor dd{margin:0}
.perfdoctor table{border-collapse:collapse}
.perfdoctor td,.perfdoctor th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid rgba(128,128,128,.35)}
.perfdoctor summary{cursor:pointer}
""".replace("\n", "")
