// Draws the charts of a page with plotly. The choice of the axes is kept in the page's address, so
// that it survives a reload and can be sent on.
const content = JSON.parse(document.getElementById("data").textContent);
const colours = ["#2a8cc0", "#e0823d", "#58a55c", "#b26ab2", "#8a8a8a", "#c0504d", "#17becf", "#bcbd22"];
const isAlone = content.runs.length === 1;
const axis = document.getElementById("axis"), log = document.getElementById("log");
const chosen = new URLSearchParams(location.hash.slice(1));

const colourOf = (number) => colours[number % colours.length];
for (const each of document.querySelectorAll("[data-run]"))
  each.style.setProperty("--run", colourOf(each.dataset.run));

const curves = content.charts.flatMap((chart) => chart.curves);
const longest = Math.max(0, ...curves.flatMap((curve) => curve.x.seconds || []));
const [unit, seconds] = longest > 36e3 ? ["hours", 3600] : longest > 600 ? ["minutes", 60] : ["seconds", 1];
for (const name of new Set(["update", ...curves.flatMap((curve) => Object.keys(curve.x))]))
  axis.add(new Option(name === "seconds" ? unit : name, name));
axis.value = curves.some((curve) => chosen.get("x") in curve.x) ? chosen.get("x") : "update";
log.checked = chosen.has("log");

function traceOf(chart, curve, place) {
  const isStacked = isAlone && chart.is_of_phases;
  const divisor = axis.value === "seconds" ? seconds : 1;
  const run = content.runs[curve.run];
  return {
    x: curve.x[axis.value].map((x) => x === null ? null : x / divisor),
    y: curve.y,
    name: isAlone ? curve.name || chart.title : [run, curve.name].filter(Boolean).join(", "),
    mode: curve.y.length < 3 ? "markers" : "lines",
    opacity: curve.is_faint ? 0.4 : 1,
    line: { color: colourOf(isStacked ? place : curve.run), width: 1.5 },
    stackgroup: isStacked ? "phases" : undefined,
  };
}

// The first updates may take a hundred times as long as others: the axis ends above nearly all, and
// a note tells how many are higher. A rate that is always the same lies in the middle.
function limitsOf(chart) {
  const values = chart.curves.flatMap((curve) => curve.y).filter((y) => y !== null);
  if (!chart.is_of_phases)
    return { range: values[0] && values.every((y) => y === values[0]) ? [0, 2 * values[0]] : undefined, notes: [] };
  const [first, ...others] = chart.curves;
  const heights = isAlone
    ? first.y.map((y, place) => others.reduce((sum, curve) => sum + (curve.y[place] ?? 0), y))
    : values;
  heights.sort((a, b) => a - b);
  const top = 1.4 * heights[Math.floor(0.95 * (heights.length - 1))];
  const higher = heights.filter((height) => height > top).length;
  const text = `${higher} higher, up to ${Number(heights.at(-1).toPrecision(3))} (double click: all)`;
  return { range: [0, top], notes: higher ? [note(text, 1)] : [] };
}

function note(text, y) {
  return { text, y, x: 0.5, showarrow: false, xref: "paper", yref: "paper" };
}

function draw() {
  const text = getComputedStyle(document.body).color;
  const grid = { gridcolor: "rgba(136,136,136,.25)", zerolinecolor: "rgba(136,136,136,.4)" };
  for (const chart of content.charts) {
    const shown = chart.curves.filter((curve) => axis.value in curve.x);
    const limits = log.checked ? { notes: [] } : limitsOf(chart);
    const traces = shown.map((curve, place) => traceOf(chart, curve, place));
    Plotly.react(chart.place, traces, {
      font: { color: text, family: "system-ui, sans-serif", size: 11 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      modebar: { bgcolor: "transparent" },
      margin: { l: 52, r: 8, t: 8, b: 40 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: getComputedStyle(document.querySelector(".controls")).backgroundColor },
      showlegend: traces.length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      uirevision: axis.value + log.checked,
      xaxis: { ...grid, title: { text: axis.selectedOptions[0].text, standoff: 6 } },
      yaxis: {
        ...grid,
        type: log.checked ? "log" : "linear",
        range: limits.range,
      },
      annotations: traces.length ? limits.notes : [note("not measured", 0.5)],
    }, { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] });
  }
}

for (const chart of content.charts) {
  const figure = document.getElementById("charts").appendChild(document.createElement("figure"));
  figure.appendChild(document.createElement("figcaption")).textContent = chart.title;
  chart.place = figure.appendChild(document.createElement("div"));
}
for (const control of [axis, log])
  control.addEventListener("change", () => {
    location.replace("#" + new URLSearchParams({ x: axis.value, ...(log.checked ? { log: "" } : {}) }));
    draw();
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
