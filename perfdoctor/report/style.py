"""Colours and layout of the HTML report. Text takes its colour from the page, so dark notebooks stay readable.

The bar's colours keep their contrast on white and on black: cool where the device ran, warm where it did not.
"""

BUSY_COLOURS = ("#2f7fd1", "#3fa7a0", "#7a72d8", "#4fb3e8", "#5f9f4a")
IDLE_COLOURS = ("#e07b39", "#d9534f", "#e0b13c", "#b8577f", "#c98b5a")
UNEXPLAINED_COLOUR = "#8d8d8d"

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
.perfdoctor .legend{list-style:none;padding:0;margin:.6rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.4rem}
.perfdoctor .legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin-right:.4rem}
.perfdoctor .card{border:1px solid rgba(128,128,128,.35);border-left:4px solid #e07b39;border-radius:6px;
padding:.7rem 1rem;margin:.7rem 0}
.perfdoctor .card.error{border-left-color:#d9534f}
.perfdoctor code,.perfdoctor pre{font:.88rem/1.5 ui-monospace,monospace;background:rgba(128,128,128,.14);
color:inherit;border-radius:4px}
.perfdoctor code{padding:.1rem .35rem;overflow-wrap:anywhere}
.perfdoctor pre{padding:.6rem .8rem;overflow-x:auto;margin:.5rem 0}
.perfdoctor dl{display:grid;grid-template-columns:7rem 1fr;gap:.15rem .8rem;margin:.5rem 0}
.perfdoctor dt{opacity:.68}
.perfdoctor dd{margin:0}
.perfdoctor table{border-collapse:collapse}
.perfdoctor td,.perfdoctor th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid rgba(128,128,128,.35)}
.perfdoctor summary{cursor:pointer}
""".replace("\n", "")
