"""The style sheet of the page. It loads no fonts, images or scripts, so the page works offline and prints."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1c2024; --quiet: #626a73; --rule: #dcdfe2; --tint: #f3f4f4; --accent: #0b6e6e;
  --heat-0: #e4eff0; --heat-1: #07404a; --parted: #a3420b;
  --c0: #0b6e6e; --c1: #d98a29; --c2: #6a5aa8; --c3: #b8475a; --c4: #7c9a3a; --c5: #4c86b8; --c6: #8f969d; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e6e8ea; --quiet: #99a2ab; --rule: #2d3338; --tint: #1c2125; --accent: #5cc3bd;
  --heat-0: #1d2b30; --heat-1: #8fe6da; --parted: #f0a46c;
  --c0: #3fa39d; --c1: #dd9a46; --c2: #9184cf; --c3: #d4697b; --c4: #9bb95a; --c5: #6ba3d3; --c6: #7d868e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1020px; margin: 0 auto; padding: 56px 30px 72px; }
h1, h2, .lead { font-family: Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, serif; }
h1 { font-size: 40px; line-height: 1.15; margin: 0 0 14px; font-weight: 700; overflow-wrap: anywhere; }
h2 { font-size: 25px; line-height: 1.25; margin: 64px 0 6px; font-weight: 700; }
h3 { font-size: 16px; margin: 34px 0 4px; }
p { max-width: 68ch; margin: 6px 0 14px; }
.lead { font-size: 20px; line-height: 1.5; margin: 0 0 30px; max-width: 60ch; }
.note, figcaption, .legend { color: var(--quiet); font-size: 14px; }
.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); margin: 0;
  border-top: 2px solid var(--ink); border-bottom: 1px solid var(--rule); }
.key div { padding: 16px 18px 16px 0; }
.key dt { font-size: 14px; color: var(--quiet); }
.key dd { margin: 0; font-size: 31px; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em; }
.key dd.sub { font-size: 14px; font-weight: 400; line-height: 1.45; letter-spacing: 0; color: var(--quiet); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 15px; margin: 14px 0 6px; }
th { font-weight: 600; font-size: 14px; color: var(--quiet); border-bottom: 1px solid var(--ink); }
th, td { text-align: right; padding: 7px 0 7px 22px; vertical-align: baseline; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
th.text, td.text { text-align: left; }
td { border-bottom: 1px solid var(--rule); }
tr.sum td { font-weight: 600; border-bottom: 0; border-top: 1px solid var(--ink); }
figure { margin: 18px 0 8px; overflow-x: auto; }
.chart { display: block; width: 100%; min-width: 600px; height: auto; }
.chart + .chart { margin-top: 14px; }
.axis, .figure { font-size: 13px; fill: var(--quiet); }
.figure { fill: var(--ink); font-weight: 600; font-size: 15px; }
.end { text-anchor: end; }
.heat rect { fill: var(--heat-1); fill: color-mix(in oklab, var(--heat-0), var(--heat-1) var(--p)); }
i.heat { background: color-mix(in oklab, var(--heat-0), var(--heat-1) var(--p)); flex: 1; }
.legend { display: flex; gap: 10px; align-items: center; flex-wrap: wrap; max-width: none; margin: 4px 0 0; }
.strip { display: inline-flex; width: 180px; height: 12px; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 9px; }
.pair { border-top: 1px solid var(--rule); padding: 18px 0 14px; }
.pair blockquote { margin: 0 0 12px; max-width: 78ch; color: var(--quiet); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px 38px; }
.sides h4 { margin: 0 0 2px; font-size: 14px; color: var(--quiet); font-weight: 600; }
.sides p { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
.parted { color: var(--parted); }
pre { background: var(--tint); padding: 16px 18px; overflow-x: auto; margin: 12px 0;
  font: 14px/1.6 ui-monospace, Menlo, Consolas, monospace; }
code { font: 0.92em ui-monospace, Menlo, Consolas, monospace; }
details { margin: 18px 0; } summary { cursor: pointer; color: var(--accent); }
details td, details th { font-size: 14px; padding-top: 4px; padding-bottom: 4px; }
footer { margin-top: 64px; border-top: 1px solid var(--rule); padding-top: 14px; color: var(--quiet); font-size: 14px; }
@media (max-width: 640px) { main { padding: 30px 18px 48px; } h1 { font-size: 31px; } }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, .pair { break-inside: avoid; } }
"""
