// Shows the numbers of a chart where the pointer is.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

const shown = (value, unit) => {
  if (unit === "%") return (100 * value).toPrecision(3) + " %";
  const size = Math.abs(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : size && size < 0.01 ? value.toExponential(1) : String(+value.toPrecision(4));
  return unit ? `${text} ${unit}` : text;
};

const nearest = (places, at) => {
  let best = 0;
  places.forEach((place, i) => { if (Math.abs(place - at) < Math.abs(places[best] - at)) best = i; });
  return best;
};

const clear = () => {
  tip.hidden = true;
  document.querySelectorAll(".cross").forEach((line) => line.remove());
};

const follow = (event) => {
  const svg = event.target.closest?.("svg[data-chart]");
  clear();
  if (!svg) return;
  const chart = JSON.parse(svg.dataset.chart);
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const [left, right, top, bottom] = chart.plot;
  if (at.x < left || at.x > right) return;
  const [low, high] = chart.range;
  const value = low + ((at.x - left) / (right - left)) * (high - low);
  const rows = chart.series.filter((one) => one.x.length).map((one) => [one, nearest(one.x, value)]);
  if (!rows.length) return;
  const place = rows[0][0].x[rows[0][1]];
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const x = left + ((place - low) / (high - low || 1)) * (right - left);
  for (const [name, to] of Object.entries({ class: "cross", x1: x, x2: x, y1: top, y2: bottom })) cross.setAttribute(name, to);
  svg.append(cross);
  tip.replaceChildren();
  const head = document.createElement("em");
  head.textContent = `${chart.x} ${chart.labels ? chart.labels[place] : shown(place, "")}`;
  tip.append(head);
  for (const [one, i] of rows) {
    const row = document.createElement("div"), dot = document.createElement("i"), number = document.createElement("b");
    dot.style.background = `var(${one.color})`;
    number.textContent = shown(one.y[i], chart.unit);
    row.append(dot, one.name, number);
    tip.append(row);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 16, innerWidth - box.width - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - box.height - 8)}px`;
};
addEventListener("pointermove", follow);
addEventListener("scroll", clear, { passive: true });
