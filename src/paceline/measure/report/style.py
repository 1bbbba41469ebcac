"""The look of a report: one style sheet for light and dark, screen and paper. No fonts, no scripts, no network."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4; --grid: #e6eaee;
  --s1: #0b62c4; --s2: #c2410c; --s3: #6e56cf; --s4: #8fa8c4; --s5: #0f8a6a; --s6: #946800; --bad: #cf222e;
  --good: #1a7f37; --warn: #9a6700; --span: #0b62c412;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1419; --card: #182029; --ink: #e6edf3; --soft: #9aa7b4; --rule: #2b3642; --grid: #212b35;
    --s1: #58a6ff; --s2: #ff9b5e; --s3: #b39dff; --s4: #4d6580; --s5: #3fcf9f; --s6: #e3b341; --bad: #ff6b6b;
    --good: #3fb950; --warn: #d8a413; --span: #58a6ff14;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 24px 0 6px; }
p { margin: 0 0 10px; max-width: 78ch; }
a { color: var(--s1); }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--card); padding: 12px 14px; border-radius: 8px; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.small { font-size: 13px; }
.verdict { display: flex; gap: 16px; align-items: baseline; margin: 20px 0 8px; padding: 14px 18px; border-radius: 10px;
  background: var(--card); border-left: 6px solid var(--soft); }
.verdict b { font-size: 20px; letter-spacing: .02em; white-space: nowrap; }
.verdict span { overflow-wrap: anywhere; }
.PASS, .faster, .same { --tone: var(--good); } .FAIL, .slower { --tone: var(--bad); }
.UNDECIDED, .DEGRADED, .undecided { --tone: var(--warn); } .INVALID { --tone: var(--bad); }
.verdict.PASS, .verdict.FAIL, .verdict.UNDECIDED, .verdict.DEGRADED, .verdict.INVALID, .verdict.faster,
.verdict.slower, .verdict.same, .verdict.undecided { border-left-color: var(--tone); }
.verdict b, .tag { color: var(--tone, var(--soft)); }
.tag { font-weight: 650; font-size: 13px; }
ul.reasons { margin: 8px 0 0; padding: 0; list-style: none; }
ul.reasons li { padding: 3px 0 3px 18px; position: relative; max-width: 100ch; }
ul.reasons li::before { content: ""; position: absolute; left: 2px; top: 11px; width: 8px; height: 8px;
  border-radius: 50%; background: var(--soft); }
ul.reasons li.invalid::before, ul.reasons li.fail::before { background: var(--bad); }
ul.reasons li.degraded::before { background: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(146px, 1fr)); gap: 12px; margin: 20px 0 4px; }
.tile { background: var(--card); border-radius: 10px; padding: 12px 14px; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 25px; font-weight: 620; letter-spacing: -.01em; line-height: 1.35; font-variant-numeric:
  tabular-nums; }
.tile .more { color: var(--soft); font-size: 12.5px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(500px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; padding: 14px 14px 8px; background: var(--card); border-radius: 10px; break-inside: avoid; }
figcaption { font-size: 13.5px; color: var(--soft); margin-bottom: 8px; min-height: 3.1em; }
figcaption b { display: block; color: var(--ink); font-size: 15px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
th small { font-weight: 400; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 6px 8px; border-bottom: 1px solid var(--rule); white-space: nowrap;
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child, th.left, td.left { text-align: left; }
td.wide { white-space: normal; min-width: 26ch; text-align: left; }
td small, th small { display: block; color: var(--soft); font-size: 11.5px; }
td.thin { color: var(--soft); } td.thin small::after { content: " thin"; color: var(--warn); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 8px 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 12px 0; } summary { cursor: pointer; color: var(--soft); }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
svg .label, svg .legend { font-size: 11.5px; } svg .legend { fill: var(--ink); }
svg .note { fill: var(--ink); font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
svg .grid { stroke: var(--grid); fill: none; } svg .axis { stroke: var(--soft); fill: none; }
svg .line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
svg .dot { fill: currentColor; } svg .area { fill: currentColor; opacity: .38; stroke: none; }
svg .band { fill: currentColor; opacity: .16; stroke: none; } svg .span { fill: var(--span); stroke: none; }
svg .mark { color: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.3; } svg .note.mark { stroke-dasharray: none;
  stroke-width: 3px; }
svg .dash { stroke-dasharray: 5 3; } svg .faint { opacity: .42; } svg .bad { color: var(--bad); }
svg .s1 { color: var(--s1); } svg .s2 { color: var(--s2); } svg .s3 { color: var(--s3); } svg .s4 { color: var(--s4); }
svg .s5 { color: var(--s5); } svg .s6 { color: var(--s6); } svg .good { color: var(--good); }
@media (max-width: 640px) { main { padding: 20px 14px 48px; } .verdict { flex-direction: column; gap: 4px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; } }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } details { display: none; } }
"""
