// Timelines of the planned and the measured step, on one time scale, with a row for each resource.

import { byId, make, setOptional, setText } from "../support/dom.js";
import * as format from "../support/format.js";
import { byBox, isOnCpu, titleOf } from "./timeline.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
// Groups of activities, by the kinds of spans in docs/timeline.md.
const GROUPS = {
  waits: ["wait_box"],
  forward: ["forward", "evaluate", "evaluate_head"],
  backward: ["backward", "head"],
  update: ["update"],
  params: ["read_params", "copy_params_in", "pull_shared", "pull_exported"],
  gradients: ["copy_grad_out", "copy_partial_out", "copy_partial_in", "read_grad", "write_grad", "pull_grads"],
  states: ["read_states", "write_states", "copy_states_out"],
  activations: ["copy_activations_out", "copy_activations_in", "read_activations", "write_activations", "pull_hidden"],
  commit: ["commit"],
};
// The names of groups that are no activities.
const NAMES = { waits: "waits for another box" };
const GROUP_OF = new Map(Object.entries(GROUPS).flatMap(([group, kinds]) => kinds.map((kind) => [kind, group])));

/** Draws traces, `{planned, measured}`, into the page. A missing trace is null. */
export function drawLanes({ planned, measured }) {
  const steps = [];
  if (planned) steps.push(["planned", planned]);
  if (measured) steps.push(["measured", measured]);
  const length = Math.max(0, ...steps.map(([, trace]) => trace.otherData.summary.period_s));
  const lanes = steps.map(([name, trace]) => [name, lanesOf(trace)]);
  const resources = new Set(lanes.flatMap(([, found]) => [...found.keys()]));
  const summaries = steps.map(([, trace]) => trace.otherData.summary);
  const isCpu = isOnCpu(summaries);
  const shown = new Set();
  const rowsOf = (resource, box) =>
    lanes.map(([name, found], index) => {
      const title = titleOf(resource, isCpu, box);
      const row = make("div", "", `lane ${name}`);
      row.append(make("span", index === 0 ? title : ""), make("span", name, "muted"));
      const label = box === null ? title : `${box}: ${title}`;
      row.append(picture(`${label}, ${name}`, found.get(resource) ?? new Map(), length, shown));
      return row;
    });
  byId("lanes-rows").replaceChildren(
    ...byBox(resources, summaries).flatMap(({ box, title, resources }) => [
      ...(title === null ? [] : [make("h3", title, "box-title")]),
      ...resources.flatMap((resource) => rowsOf(resource, box)),
    ]),
  );
  byId("lanes-keys").replaceChildren(
    ...Object.keys(GROUPS)
      .filter((group) => shown.has(group))
      .map((group) => make("li", nameOf(group), group)),
  );
  const step = measured ? ` Measured is step ${format.whole(measured.otherData.step)}.` : "";
  setText(byId("lanes-scale"), `The rows are ${format.small(length)} s long.${step}`);
}

const nameOf = (group) => NAMES[group] ?? group;

/** Shows a text instead of the timelines. */
export function noteLanes(text) {
  setOptional(byId("lanes-note"), text);
}

/** Returns the busy intervals of a trace by resource and group, in seconds of the step's period. */
function lanesOf(trace) {
  const names = new Map();
  const lanes = new Map();
  const period = trace.otherData.summary.period_s;
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") names.set(event.pid, event.args.name);
    const group = event.ph === "X" ? GROUP_OF.get(event.cat) : undefined;
    if (!group) continue;
    const start = Math.max(0, event.ts / 1e6);
    const end = Math.min(period, (event.ts + event.dur) / 1e6);
    if (end <= start) continue;
    const resource = names.get(event.pid);
    if (!lanes.has(resource)) lanes.set(resource, new Map());
    const groups = lanes.get(resource);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([start, end]);
  }
  return lanes;
}

function picture(label, groups, length, shown) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const group of Object.keys(GROUPS)) {
    if (!groups.has(group)) continue;
    shown.add(group);
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", group);
    path.setAttribute("d", outline(groups.get(group), WIDTH / length));
    const title = document.createElementNS(SVG, "title");
    title.textContent = nameOf(group);
    path.append(title);
    svg.append(path);
  }
  return svg;
}

/** Returns the outline of bars for time intervals. Bars less than a fraction of a pixel apart are merged. */
function outline(stretches, scale) {
  const bars = [];
  for (const [start, end] of stretches.sort(([a], [b]) => a - b)) {
    const [x, stop] = [start * scale, end * scale];
    const last = bars.at(-1);
    if (last && x <= last[1] + 0.25) last[1] = Math.max(last[1], stop);
    else bars.push([x, stop]);
  }
  const number = (value) => Number(value.toFixed(2));
  return bars.map(([x, stop]) => `M${number(x)} 0H${number(Math.max(stop, x + 0.25))}V1H${number(x)}Z`).join("");
}
