"use strict";
// Values beside the pointer, and the order of tables. The page is whole without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;

  const element = (parent, name, kind, text) => {
    const made = parent.appendChild(document.createElement(name));
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const digits = (value, most) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e9) return String(Number(value.toPrecision(most)).toExponential()).replace("e+", "e");
    return Number(value.toPrecision(size >= 1e4 ? 5 : most)).toLocaleString("en", { maximumFractionDigits: 9 });
  };
  const words = (value, unit) => {
    if (value === null) return "–";
    if (typeof value === "string") return value;
    if (unit === "share") return digits(100 * value, 3) + " %";
    const sizes = { seconds: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]], bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]] }[unit] || [];
    const [size, name] = sizes.find(([least]) => Math.abs(value) >= least) || [1, ""];
    return (digits(value / size, sizes.length ? 3 : 5) + " " + name).trim();
  };
  const steps = (first, last) => (first === last ? `step ${last.toLocaleString("en")}` : `steps ${first.toLocaleString("en")}–${last.toLocaleString("en")}`);

  // The place of the value in rising `values` that is nearest to `wanted`.
  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  };
  const middle = (line, at) => (line.first ? (line.first[at] + line.steps[at]) / 2 : line.steps[at]);

  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth - 8;
    tip.style.left = Math.max(8, right ? event.clientX - 16 - box.width : event.clientX + 16) + "px";
    tip.style.top = Math.max(8, Math.min(event.clientY + 16, innerHeight - box.height - 8)) + "px";
  };

  const clear = () => {
    tip.hidden = true;
    tip.className = "";
    document.querySelectorAll(".cross, .dot").forEach((each) => each.remove());
    document.querySelectorAll(".pointed").forEach((each) => each.classList.remove("pointed"));
  };

  const watch = (plot, over) => {
    plot.addEventListener("pointermove", over);
    plot.addEventListener("pointerdown", over);
    plot.addEventListener("pointerleave", clear);
  };

  // A chart's axis is steps, as of all others, or if it has an end of its own, time.
  const own = (plot) => (plot.dataset.chart ? data.charts[plot.dataset.chart].microseconds : undefined);
  const cross = (place, microseconds) => {
    document.querySelectorAll("[data-chart], [data-heatmap]").forEach((plot) => {
      if (own(plot) === microseconds) element(plot, "span", "cross").style.left = (100 * place) / (microseconds || data.last) + "%";
    });
  };

  const onChart = (plot, event, share) => {
    const chart = data.charts[plot.dataset.chart];
    const last = chart.microseconds || data.last;
    const at = (first, final) => (chart.microseconds ? words(final / 1e6, "seconds") : steps(first, final));
    const wanted = share * last;
    const near = (line) => line.steps.length && wanted > line.steps[0] - last / 50 && wanted < line.steps[line.steps.length - 1] + last / 50;
    const known = chart.lines.filter(near);
    if (!known.length) return;
    const found = known.map((line) => [line, nearest(line.steps, wanted)]);
    const [closest, closestAt] = found.reduce((best, each) => (Math.abs(each[0].steps[each[1]] - wanted) < Math.abs(best[0].steps[best[1]] - wanted) ? each : best));
    const step = closest.steps[closestAt];
    cross(middle(closest, closestAt), chart.microseconds);
    tip.replaceChildren();
    element(tip, "div", "head", at(closest.first ? closest.first[closestAt] : step, step));
    const table = element(tip, "table");
    const [low, high, logarithmic] = chart.up;
    const turned = logarithmic ? (value) => Math.log(Math.max(low, value)) : (value) => value;
    for (const [line, place] of found) {
      const row = element(table, "tr");
      const key = element(element(row, "td"), "span", "key");
      const colour = `var(--${line.colour})`;
      element(key, "b", line.kind).style.setProperty("--colour", colour);
      element(key, "span", "", line.name);
      const value = line.mean[place];
      element(row, "td", "number", words(value, chart.unit));
      const more = [];
      if (line.low && line.low[place] !== line.high[place]) more.push(`${words(line.low[place], chart.unit)} to ${words(line.high[place], chart.unit)}`);
      if (line.steps[place] !== step) more.push(`at ${at(line.steps[place], line.steps[place])}`);
      element(row, "td", "", "").appendChild(document.createElement("small")).textContent = more.join(", ");
      if (typeof value === "number") {
        const dot = element(plot, "span", "dot");
        dot.style.setProperty("--colour", colour);
        dot.style.left = (100 * middle(line, place)) / last + "%";
        dot.style.bottom = (100 * (turned(value) - turned(low))) / (turned(high) - turned(low)) + "%";
        dot.style.margin = "0 0 -4.5px -4.5px";
      }
    }
    const pixels = 5 / plot.clientWidth;
    for (const [step, text] of chart.marks) if (Math.abs(step / last - share) < pixels) element(tip, "div", "", `${steps(step, step)}: ${text}`);
    place(event);
  };

  const onHeatmap = (plot, event, share, down) => {
    const heat = data.heatmaps[plot.dataset.heatmap];
    const column = Math.min(heat.columns - 1, Math.floor(share * heat.columns));
    const row = Math.min(heat.ranks.length - 1, Math.max(0, Math.floor(down * heat.ranks.length)));
    const first = Math.floor((column * heat.last) / heat.columns) + 1;
    cross(((column + 0.5) * heat.last) / heat.columns);
    tip.replaceChildren();
    element(tip, "div", "head", `${heat.ranks[row]}, ${steps(first, Math.max(first, Math.floor(((column + 1) * heat.last) / heat.columns)))}`);
    const table = element(tip, "table");
    for (const [part, rows] of Object.entries(heat.mean)) {
      const line = element(table, "tr");
      element(line, "td", "", part);
      element(line, "td", "number", words(rows[row][column], heat.unit));
      const most = heat.most ? heat.most[row][column] : null;
      const longer = part === "step" && most !== null && most > rows[row][column] * 1.005;
      element(element(line, "td"), "small", "", longer ? `at most ${words(most, "seconds")}` : "");
    }
    place(event);
  };

  document.querySelectorAll("[data-chart], [data-heatmap]").forEach((plot) => {
    const over = (event) => {
      clear();
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      if (plot.dataset.chart) onChart(plot, event, share);
      else onHeatmap(plot, event, share, (event.clientY - box.top) / box.height);
    };
    watch(plot, over);
  });

  document.querySelectorAll("[data-tip]").forEach((each) => {
    each.addEventListener("pointermove", (event) => {
      tip.replaceChildren(each.dataset.tip);
      place(event);
    });
    each.addEventListener("pointerleave", clear);
  });

  // With several runs, the one whose name is pointed at stands out.
  if (data.runs && data.runs.length > 1) {
    document.querySelectorAll(".key[data-run]").forEach((key) => {
      const others = () => document.querySelectorAll(`path[data-run]:not([data-run="${key.dataset.run}"])`);
      key.addEventListener("pointerenter", () => others().forEach((path) => path.classList.add("dimmed")));
      key.addEventListener("pointerleave", () => others().forEach((path) => path.classList.remove("dimmed")));
    });
  }

  const grain = 10000, reach = 30;
  // The segments of a path's `d`, which has absolute points alone: [x, y, x, y] each.
  const segments = (path) =>
    path.getAttribute("d").split("M").slice(1).flatMap((run) => {
      const points = run.split("L").map((point) => point.split(" ").map(Number));
      return points.slice(1).map((point, at) => [...points[at], ...point]);
    });

  const squared = ([x, y, toX, toY], atX, atY, width, height) => {
    const left = (x / grain) * width - atX, up = (y / grain) * height - atY;
    const across = ((toX - x) / grain) * width, along = ((toY - y) / grain) * height;
    const length = across * across + along * along;
    const share = length ? Math.min(1, Math.max(0, -(left * across + up * along) / length)) : 0;
    return (left + share * across) ** 2 + (up + share * along) ** 2;
  };

  document.querySelectorAll(".plot.trials").forEach((plot) => {
    const svg = plot.querySelector("svg");
    let lines = null;
    const over = (event) => {
      lines = lines || [...plot.querySelectorAll("path[data-trial]")].reverse().map((path) => [path.dataset.trial, segments(path)]);
      const box = svg.getBoundingClientRect();
      const atX = event.clientX - box.left, atY = event.clientY - box.top;
      let found = null, closest = reach * reach;
      for (const [trial, parts] of lines) {
        for (const part of parts) {
          const distance = squared(part, atX, atY, box.width, box.height);
          if (distance < closest) [found, closest] = [trial, distance];
        }
      }
      clear();
      if (found === null) return;
      document.querySelectorAll(`path[data-trial="${found}"]`).forEach((path) => {
        path.classList.add("pointed");
        path.closest(".plot").classList.add("pointed");
      });
      tip.className = "text";
      tip.textContent = data.trials[found];
      place(event);
    };
    watch(plot, over);
  });

  // A click on a column's head sorts by it, and one more turns the order. What has no value is last.
  document.querySelectorAll("table.all").forEach((table) => {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const turned = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", turned > 0 ? "ascending" : "descending");
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
        const numeric = head.classList.contains("number");
        const compare = ([a], [b]) => (a === "" || b === "" ? (a === "") - (b === "") : turned * (numeric ? a - b : a.localeCompare(b)));
        rows.sort(compare).forEach(([, row]) => table.tBodies[0].append(row));
      });
    });
  });
})();
