// The page of boxes: a card for each with what is free, what runs and waits, its versions and what doctor found.

import * as api from "../support/api.js";
import { byId, make, setBadge, setOptional, setText } from "../support/dom.js";
import * as format from "../support/format.js";
import { Join } from "./join.js";
import { nameOf } from "./jobs.js";

const PROGRAMS = { windlass: "windlass", python: "Python", torch: "PyTorch", ray: "Ray" };
const LISTS = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["paused", "Paused"],
];
const WORN = 0.8; // share of an SSD's rating from which its bar warns

export class Boxes {
  #boxes = [];
  #cards = new Map(); // id: element
  #isShown = false;
  #isReading = false;
  #readsAgain = false;
  #isAdmin = "admin" in document.body.dataset;
  #join = new Join();

  constructor() {
    byId("remove-confirm").addEventListener("click", () => this.#remove());
  }

  /** Returns whether the service has other boxes than its head. */
  get areSeveral() {
    return this.#boxes.length > 1;
  }

  /** Shows or hides the page. A page that is hidden forgets its join code. */
  show(isShown) {
    const begins = isShown && !this.#isShown;
    this.#isShown = isShown;
    byId("boxes").hidden = !isShown;
    if (!isShown) this.#join.close();
    if (begins) this.read();
  }

  /** Reads the boxes, and once more if that was requested meanwhile. */
  async read() {
    this.#readsAgain = this.#isReading;
    if (this.#isReading) return;
    this.#isReading = true;
    try {
      const page = await api.listBoxes();
      this.#boxes = page.data;
      this.#join.address = page.windlass.cluster_address;
      setOptional(byId("boxes-problem"), null);
    } catch (error) {
      // If the service does not answer, the page's head says so.
      if (error instanceof api.Refusal) setOptional(byId("boxes-problem"), error.message);
    } finally {
      this.#isReading = false;
    }
    this.render();
    if (this.#readsAgain) await this.read();
  }

  render() {
    if (!this.#isShown) return;
    setText(byId("boxes-summary"), summaryOf(this.#boxes));
    byId("boxes-alone").hidden = this.#boxes.length !== 1;
    this.#join.render();
    const list = byId("box-list");
    const shown = new Set(this.#boxes.map((box) => box.id));
    for (const [id, card] of this.#cards) {
      if (shown.has(id)) continue;
      card.remove();
      this.#cards.delete(id);
    }
    this.#boxes.forEach((box, index) => {
      if (!this.#cards.has(box.id)) this.#cards.set(box.id, this.#makeCard(box));
      const card = this.#cards.get(box.id);
      this.#renderCard(card, box);
      if (list.children[index] !== card) list.insertBefore(card, list.children[index] ?? null);
    });
  }

  #makeCard(box) {
    const card = byId("box-item").content.firstElementChild.cloneNode(true);
    const article = card.firstElementChild;
    article.dataset.box = box.name;
    article.setAttribute("aria-label", `Box ${box.name}`);
    card.querySelector(".box-drain").addEventListener("click", () => this.#drainOrResume(box.name));
    card.querySelector(".box-remove").addEventListener("click", () => this.#askToRemove(box.name));
    return card;
  }

  #renderCard(card, box) {
    const part = (name) => card.querySelector(name);
    setText(part(".box-name"), box.name);
    setBadge(part(".badge"), box.state);
    setText(part(".box-about"), aboutOf(box));
    setOptional(part(".box-reason"), reasonOf(box));
    renderBars(part(".box-bars"), barsOf(box));
    const problems = box.findings.filter((finding) => finding.is_problem).map((finding) => finding.text);
    setPoints(part(".box-problems"), problems);
    setPoints(part(".box-checks"), box.findings.filter((finding) => !finding.is_problem).map((finding) => finding.text));
    part(".box-more").hidden = box.findings.length === problems.length;
    renderJobs(part(".box-jobs"), box);
    setText(part(".box-versions"), versionsOf(box));
    setOptional(part(".box-unequal"), unequalOf(box));
    const canChange = this.#isAdmin && !box.is_head && box.state !== "removed";
    part(".detail-actions").hidden = !canChange;
    setText(part(".box-drain"), box.is_draining ? "Resume" : "Drain");
  }

  #find(name) {
    return this.#boxes.find((box) => box.name === name);
  }

  async #drainOrResume(name) {
    const change = this.#find(name).is_draining ? api.resumeBox : api.drainBox;
    let problem = null;
    try {
      await change(name);
    } catch (error) {
      problem = problemOf(error);
    }
    await this.read();
    const card = this.#cards.get(this.#find(name)?.id);
    if (card) setOptional(card.querySelector(".box-error"), problem);
  }

  #askToRemove(name) {
    const box = this.#find(name);
    byId("remove-dialog").dataset.box = name;
    setText(byId("remove-title"), `Remove box ${name}?`);
    setText(byId("remove-text"), "Its calls are refused from now on. To come back, it joins again with a new code.");
    setPoints(byId("remove-points"), consequencesOf(box));
    setOptional(byId("remove-error"), null);
    byId("remove-dialog").showModal();
  }

  async #remove() {
    const dialog = byId("remove-dialog");
    const button = byId("remove-confirm");
    button.disabled = true;
    try {
      await api.removeBox(dialog.dataset.box);
      dialog.close();
    } catch (error) {
      setOptional(byId("remove-error"), problemOf(error));
    } finally {
      button.disabled = false;
    }
    await this.read();
  }
}

const problemOf = (error) =>
  error instanceof api.Refusal ? error.message : "The service did not answer; try again.";

const plural = (count, noun) => `${format.whole(count)} ${noun}${count === 1 ? "" : "s"}`;

function summaryOf(boxes) {
  if (boxes.length === 0) return "";
  const sum = (of) => boxes.reduce((total, box) => total + of(box), 0);
  const isUsable = (box) => box.state === "ready";
  const free = sum((box) => (isUsable(box) ? box.devices.free : 0));
  return [
    `${boxes.length} ${boxes.length === 1 ? "box" : "boxes"}`,
    `${free} of ${plural(sum((box) => box.devices.total), "device")} free`,
    `${plural(sum((box) => box.jobs.running.total), "job")} running`,
    `${sum((box) => box.jobs.waiting.total)} waiting`,
  ].join(" · ");
}

function aboutOf(box) {
  const gpus = new Map();
  for (const { name } of box.facts?.gpus ?? []) gpus.set(name, (gpus.get(name) ?? 0) + 1);
  const parts = [
    box.is_head ? "the service itself" : box.address,
    ...[...gpus].map(([name, count]) => (count === 1 ? name : `${count} × ${name}`)),
    box.facts && plural(box.facts.num_cores, "core"),
    box.link_bytes_per_s && `link to the head ${format.bytes(box.link_bytes_per_s)}/s`,
    box.joined_at && `joined ${format.dateTime(box.joined_at)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function reasonOf(box) {
  const since = (time) => (time === null ? "" : ` since ${format.dateTime(time)}`);
  const held = box.jobs.running.begun + box.jobs.waiting.begun + box.jobs.paused.begun;
  const waits = held > 0 ? ` ${plural(held, "job")} with states on it wait${held === 1 ? "s" : ""} until it is back.` : "";
  if (box.state === "removed") {
    return `Removed${since(box.state_since)}. It holds the states of ${plural(held, "job")}; start each elsewhere with “windlass restart”.`;
  }
  const draining = `Draining${since(box.state_since)}: it gets no jobs, and its attempts end at a commit.`;
  if (box.state !== "away") return box.is_draining ? draining : null;
  return `Away${since(box.away_since)}: it does not call, and its figures are the last ones.${waits}${box.is_draining ? ` ${draining}` : ""}`;
}

/** The bars of a card: name, value from 0 to 1, or null if it is not known, what it says, and whether it warns. */
function barsOf({ devices, memory, ssds }) {
  const kind = devices.kind === "gpu" ? "GPUs" : "CPU devices";
  const used = memory.free_bytes === null ? null : Math.max(0, memory.total_bytes - memory.free_bytes);
  const bars = [
    { name: kind, share: devices.total ? devices.used / devices.total : null, text: `${devices.used} of ${devices.total} used` },
    {
      name: "Memory",
      share: used === null || !memory.total_bytes ? null : used / memory.total_bytes,
      text: memory.free_bytes === null ? "not known" : `${format.bytes(memory.free_bytes)} of ${format.bytes(memory.total_bytes)} free`,
    },
  ];
  for (const ssd of ssds) {
    const taken = ssd.total_bytes - ssd.free_bytes;
    bars.push({
      name: `Space of ${ssd.path}`,
      share: ssd.total_bytes ? taken / ssd.total_bytes : null,
      text: `${format.bytes(ssd.free_bytes)} of ${format.bytes(ssd.total_bytes)} free`,
    });
    if (ssd.written_bytes === null && ssd.rated_bytes === null) continue;
    bars.push({
      name: `Wear of ${ssd.path}`,
      share: ssd.worn,
      text: wearOf(ssd),
      warns: ssd.worn !== null && ssd.worn >= WORN,
    });
  }
  return bars;
}

function wearOf({ written_bytes: written, rated_bytes: rated }) {
  if (written === null) return `rated for ${format.bytes(rated)}`;
  return rated === null ? `${format.bytes(written)} written` : `${format.bytes(written)} of ${format.bytes(rated)} rated`;
}

function renderBars(list, bars) {
  const names = JSON.stringify(bars.map(({ name, share }) => [name, share === null]));
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...bars.map(makeBar));
  }
  bars.forEach(({ share, text, warns }, index) => {
    const item = list.children[index];
    const bar = item.querySelector("progress");
    if (bar) bar.value = share;
    item.classList.toggle("warns", warns === true);
    setText(item.lastChild, text);
  });
}

function makeBar({ name, share }) {
  const item = make("li");
  const meters = make("span", "", "meters");
  if (share !== null) {
    const bar = make("progress");
    bar.setAttribute("aria-label", `${name}: used share`);
    meters.append(bar);
  }
  item.append(make("span", name, "bar-name"), meters, make("span", "", "share"));
  return item;
}

function setPoints(list, texts) {
  const key = JSON.stringify(texts);
  list.hidden = texts.length === 0;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...texts.map((text) => make("li", text)));
}

function renderJobs(part, box) {
  const key = JSON.stringify(box.jobs);
  if (part.dataset.key === key) return;
  part.dataset.key = key;
  const lists = LISTS.filter(([name]) => box.jobs[name].total > 0);
  part.replaceChildren(
    ...lists.flatMap(([name, title]) => [make("h3", `${title} (${box.jobs[name].total})`), jobList(box.jobs[name])]),
  );
  if (lists.length === 0) part.replaceChildren(make("p", "No jobs.", "muted"));
}

function jobList({ data, total, of_others: ofOthers }) {
  const list = make("ul", "", "box-job-list");
  for (const job of data) {
    const item = make("li");
    const link = make("a", nameOf(job));
    link.href = `#/jobs/${encodeURIComponent(job.id)}`;
    item.append(link, make("span", figuresOf(job), "muted"));
    if (job.waiting_reason) item.append(make("span", job.waiting_reason, "box-job-reason"));
    list.append(item);
  }
  const unnamed = total - ofOthers - data.length;
  const more = [ofOthers > 0 && `${format.whole(ofOthers)} of other users`, unnamed > 0 && `${format.whole(unnamed)} more`];
  for (const text of more.filter(Boolean)) list.append(make("li", text, "muted"));
  return list;
}

function figuresOf(job) {
  const steps = job.total_steps ? `${format.whole(job.step)}/${format.whole(job.total_steps)}` : null;
  const parts = [job.id.slice(0, 14), job.gpus > 1 && `${job.gpus} GPUs`, steps];
  return parts.filter(Boolean).join(" · ");
}

function versionsOf({ versions }) {
  if (versions === null) return "It has not told its versions.";
  return Object.entries(PROGRAMS)
    .map(([key, name]) => `${name} ${versions[key]}`)
    .join(" · ");
}

function unequalOf({ unequal_versions: names }) {
  if (names.length === 0) return null;
  const programs = names.map((name) => PROGRAMS[name] ?? name).join(" and ");
  return `${programs}: not the head's version${names.length === 1 ? "" : "s"}. Results may differ in the last bit.`;
}

function consequencesOf({ jobs }) {
  const begun = jobs.running.begun + jobs.waiting.begun + jobs.paused.begun;
  const fresh = jobs.running.total + jobs.waiting.total + jobs.paused.total - begun;
  const points = [];
  if (fresh > 0) {
    points.push(`${plural(fresh, "job")} that ha${fresh === 1 ? "s" : "ve"} not begun go${fresh === 1 ? "es" : ""} back to the queue.`);
  }
  if (begun > 0) {
    points.push(
      `${plural(begun, "job")} that ha${begun === 1 ? "s" : "ve"} begun wait${begun === 1 ? "s" : ""} until a person starts ` +
        "each elsewhere from its last checkpoint with “windlass restart”. The steps since then are lost.",
    );
  }
  return points.length > 0 ? points : ["It holds no unfinished job."];
}
