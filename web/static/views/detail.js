// The selected job: its figures, curve, events and settings.

import * as api from "../support/api.js";
import { Chart } from "../charts/chart.js";
import { Curve } from "../charts/curve.js";
import { byId, make, setBadge, setOptional, setPairs, setText } from "../support/dom.js";
import * as format from "../support/format.js";
import { TERMINAL, boxesOf, nameOf, progressOf, reasonOf } from "./jobs.js";
import { drawLanes, noteLanes } from "./lanes.js";
import { renderPlan } from "./plan.js";
import { renderTimeline } from "./timeline.js";

const MAX_LOG_LINES = 500;
const LEVELS = { warn: "warning", error: "error" };

export class Detail {
  id = null;
  #jobs;
  #areSeveralBoxes;
  #chart = new Chart(byId("chart"));
  #pending = []; // [event, ordinal] pairs received while the rest was being read
  #curve = null; // null: not read yet
  #curveChanged = false;
  #log = new Map(); // event id: event
  #hasOlderLog = false;
  #logChanged = false;
  #checkpoints = [];
  #files = new Map(); // id: name
  #storage = null; // the job's disk usage when it was selected
  #plan = null;
  #planOf = null; // the job's state for which the plan was read
  #problem = null;

  /** `areSeveralBoxes`: returns whether the service has other boxes than its head. */
  constructor(jobs, areSeveralBoxes) {
    this.#jobs = jobs;
    this.#areSeveralBoxes = areSeveralBoxes;
    byId("lanes").addEventListener("toggle", () => byId("lanes").open && this.#drawLanes());
    byId("lanes-again").addEventListener("click", () => this.#drawLanes());
  }

  /** Selects a job, or none, and reads its data that the list lacks. A job that is already selected is read again. */
  async show(id) {
    if (id !== this.id) this.#forget();
    this.id = id;
    this.#curve = null;
    this.#curveChanged = false;
    this.#pending = [];
    this.render();
    if (id === null) return;
    const isCurrent = () => this.id === id;
    try {
      const [job, metrics, messages] = await Promise.all([
        api.getJob(id),
        api.getMetrics(id),
        api.listMessages(id, MAX_LOG_LINES),
      ]);
      if (!isCurrent()) return;
      this.#jobs.put(job);
      this.#curve = new Curve(metrics);
      this.#curveChanged = true;
      this.#hasOlderLog = messages.has_more;
      // The service lists the newest first; the log is in order of time.
      for (const event of messages.data.reverse()) this.#addToLog(event);
      for (const [event, ordinal] of this.#pending.splice(0)) this.apply(event, ordinal);
      this.#problem = null;
    } catch (error) {
      if (!isCurrent()) return;
      this.#problem = error instanceof api.Refusal ? error.message : "The service did not answer.";
      setOptional(byId("chart-note"), this.#problem);
    }
    this.render();
    await Promise.all([this.#readCheckpoints(id), this.#readFileNames(id), this.#readStorage(id)]);
  }

  /** True if reading failed, so that `show` should be called again once the service answers. */
  get hasFailed() {
    return this.#problem !== null;
  }

  /** Adds an event of the selected job. */
  apply(event, ordinal) {
    if (this.#curve === null) {
      this.#pending.push([event, ordinal]);
      return;
    }
    if (this.#curve.apply(event, ordinal)) this.#curveChanged = true;
    if (event.type === "message") this.#addToLog(event);
    if (event.data.fine_tuned_model_checkpoint) this.#readCheckpoints(this.id);
  }

  render() {
    const entry = this.id === null ? undefined : this.#jobs.get(this.id);
    byId("detail-job").hidden = !entry;
    const hint = this.#problem ?? (this.id === null ? "Choose a job to see how it goes." : "Reading…");
    setOptional(byId("detail-none"), entry ? null : hint);
    if (!entry) return;
    this.#renderHead(entry);
    this.#renderProgress(entry);
    this.#renderFigures(entry);
    this.#renderPlan(entry);
    this.#renderSettings(entry);
    if (this.#curveChanged) this.#renderCurve(TERMINAL.has(entry.job.status));
    if (this.#logChanged) this.#renderLog();
  }

  #forget() {
    this.#log.clear();
    this.#logChanged = true;
    this.#checkpoints = [];
    this.#files.clear();
    this.#storage = null;
    this.#plan = this.#planOf = null;
    this.#problem = null;
    setOptional(byId("pause-error"), null);
    byId("lanes").open = false;
    byId("lanes-rows").replaceChildren();
    byId("log").replaceChildren();
    byId("chart").hidden = true;
    byId("legend").hidden = true;
    setOptional(byId("chart-note"), "Reading…");
    this.#renderCheckpoints();
  }

  #addToLog(event) {
    if (this.#log.has(event.id)) return;
    this.#log.set(event.id, event);
    this.#logChanged = true;
  }

  async #readCheckpoints(id) {
    const page = await api.listCheckpoints(id).catch(() => null);
    if (page === null || this.id !== id) return;
    this.#checkpoints = page.data;
    this.#renderCheckpoints();
  }

  async #readStorage(id) {
    if (!this.#jobs.get(id)?.job.windlass.is_here) return; // another box has its files
    const storage = await api.getStorage(id).catch(() => null);
    if (storage === null || this.id !== id) return;
    this.#storage = storage;
    this.render();
  }

  async #readFileNames(id) {
    const job = this.#jobs.get(id)?.job;
    if (!job) return;
    for (const fileId of [job.training_file, job.validation_file]) {
      if (fileId === null || this.#files.has(fileId)) continue;
      const name = await api.getFile(fileId).then((file) => file.filename).catch(() => null);
      if (this.id !== id) return;
      if (name !== null) this.#files.set(fileId, name);
    }
    this.render();
  }

  /** Reads the plan again after a change of status or attempt, because either may bring a new plan. */
  async #readPlan({ job }) {
    // A job that waits for its boxes is divided when they are chosen. It then waits for another reason.
    const reason = isOverBoxes(job) && job.status === "queued" ? job.windlass.waiting_reason : "";
    const state = `${job.id} ${job.status} ${job.windlass.attempt} ${reason}`;
    // A job over boxes has a division, and no plan of one box. The answer then has the division's simulated step.
    if ((!job.windlass.has_plan && !isOverBoxes(job)) || this.#planOf === state) return;
    this.#planOf = state;
    try {
      const plan = await api.getPlan(job.id);
      if (this.#planOf !== state) return;
      this.#plan = plan;
      this.render();
    } catch (error) {
      // If the service is unreachable, the next drawing reads the plan again.
      if (this.#planOf === state && !(error instanceof api.Refusal)) this.#planOf = null;
    }
  }

  #renderPlan(entry) {
    this.#readPlan(entry);
    const { id } = entry.job;
    renderPlan(this.#plan, entry.measured);
    renderTimeline(entry.timeline, this.#plan?.simulated?.summary ?? null, {
      measured: { url: api.timelineUrl(id), name: `${id}-timeline.json` },
      planned: { url: api.plannedTimelineUrl(id), name: `${id}-planned-timeline.json` },
    });
  }

  async #drawLanes() {
    const { id } = this;
    const entry = this.#jobs.get(id);
    const isMeasured = entry?.timeline != null;
    noteLanes("Reading…");
    try {
      const [planned, measured] = await Promise.all([
        this.#plan?.simulated || (entry && isOverBoxes(entry.job)) ? plannedTrace(id) : null,
        isMeasured ? api.getTrace(api.timelineUrl(id)) : null,
      ]);
      if (this.id !== id) return;
      drawLanes({ planned, measured });
      noteLanes(null);
    } catch (error) {
      if (this.id === id) noteLanes(error instanceof api.Refusal ? error.message : "The service did not answer.");
    }
  }

  #renderHead(entry) {
    const { job } = entry;
    setText(byId("detail-name"), nameOf(job));
    setBadge(byId("detail-status"), job.status);
    setText(byId("detail-model"), nameOf(job) === job.model ? "" : job.model);
    setText(byId("detail-id"), job.id);
    setOptional(byId("detail-reason"), reasonOf(entry));
    byId("detail-error").hidden = job.error === null;
    setText(byId("detail-error-code"), job.error ? format.words(job.error.code ?? "failed") : "");
    // A plan that does not fit lists its shortages in a panel, so the error shows only its first reason.
    const refusal = this.#plan?.feasible === false ? this.#plan.reasons[0] : null;
    setText(byId("detail-error-message"), refusal ?? job.error?.message ?? "");
    const cancel = byId("cancel");
    cancel.hidden = TERMINAL.has(job.status);
    cancel.disabled = job.windlass.cancel_requested;
    setText(cancel, cancel.disabled ? "Cancelling…" : "Cancel job");
    const pause = byId("pause");
    pause.hidden = TERMINAL.has(job.status) || job.windlass.cancel_requested;
    pause.disabled = job.status === "pausing";
    setText(pause, { pausing: "Pausing…", paused: "Resume" }[job.status] ?? "Pause");
    byId("detail-result").hidden = job.fine_tuned_model === null;
    setText(byId("detail-result-model"), job.fine_tuned_model ?? "");
    setText(byId("detail-result-export"), `windlass export ${job.id} my-model`);
    this.#renderResultFiles(job.result_files);
  }

  #renderResultFiles(ids) {
    const links = byId("detail-result-files");
    if (links.dataset.ids === ids.join()) return;
    links.dataset.ids = ids.join();
    links.replaceChildren(
      ...ids.map((id) => {
        const link = make("a", "Metrics of all steps (CSV)");
        link.href = api.fileContentUrl(id);
        link.download = `${id}.csv`;
        return link;
      }),
    );
  }

  #renderProgress(entry) {
    const { step, total } = progressOf(entry);
    byId("detail-progress").hidden = !total;
    if (!total) return;
    byId("detail-bar").max = total;
    byId("detail-bar").value = step;
    byId("detail-bar").dataset.status = entry.job.status;
    setText(byId("detail-steps"), `step ${format.whole(step)} of ${format.whole(total)}`);
    setText(byId("detail-times"), timesOf(entry));
  }

  #renderFigures({ job, metrics }) {
    byId("figures").hidden = !metrics;
    const data = metrics ?? {};
    const valid = this.#curve?.valid.y.at(-1);
    setPairs(byId("figures"), [
      ["Training loss", format.loss(data.train_loss)],
      ["Validation loss", format.loss(valid)],
      ["Learning rate", format.small(data.learning_rate)],
      ["Tokens per second", format.rate(data.tokens_per_s)],
      ["Seconds per step", format.small(data.step_s)],
      ["Trained tokens", format.whole(data.trained_tokens ?? job.trained_tokens)],
      ["Read from SSD", format.bytes(data.ssd_bytes_read)],
      ["Written to SSD", format.bytes(data.ssd_bytes_written)],
    ]);
    const wear = job.windlass.ssd_wear;
    setOptional(byId("detail-wear"), wear && `SSD wear: ${wear.summary}`);
  }

  #renderSettings({ job }) {
    const resolved = job.windlass.hyperparameters;
    const asked = Object.entries(job.windlass.settings).filter(([, value]) => isSaid(value));
    byId("settings-note").hidden = resolved !== null;
    setPairs(
      byId("settings"),
      (resolved ? Object.entries(resolved) : asked).map(([name, value]) => [format.words(name), format.setting(value)]),
    );
    const file = (id) => (this.#files.has(id) ? `${this.#files.get(id)}\n${id}` : id);
    const time = (seconds) => (seconds === null ? null : format.dateTime(seconds));
    const about = [
      ["model", job.model],
      ["training file", file(job.training_file)],
      ["validation file", job.validation_file && file(job.validation_file)],
      ["GPUs", gpusOf(job.windlass)],
      ["box", this.#areSeveralBoxes() ? boxesOf(job) : null],
      ["created", time(job.created_at)],
      ["started", time(job.windlass.started_at)],
      ["finished", time(job.finished_at)],
      ["attempt", job.windlass.attempt > 1 ? String(job.windlass.attempt) : null],
      ["priority", job.windlass.priority === 0 ? null : String(job.windlass.priority)],
      ["on disks", this.#storage && format.bytes(this.#storage.bytes)],
      ...Object.entries(job.metadata),
    ];
    setPairs(byId("about"), about.filter(([, value]) => value !== null));
  }

  #renderCurve(isOver) {
    this.#curveChanged = false;
    const { train, valid } = this.#curve;
    const isEmpty = train.x.length + valid.x.length === 0;
    const chart = byId("chart");
    chart.hidden = isEmpty;
    byId("legend").hidden = isEmpty;
    const note = isOver ? "This job made no step." : "The curve begins with the first step.";
    setOptional(byId("chart-note"), isEmpty ? note : null);
    if (isEmpty) return;
    chart.setAttribute("aria-label", `Loss curve. ${describe("Training", train)} ${describe("Validation", valid)}`);
    byId("legend-valid").hidden = valid.x.length === 0;
    this.#chart.draw({ key: this.id, train, valid });
  }

  #renderLog() {
    this.#logChanged = false;
    const list = byId("log");
    const followsEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
    const events = [...this.#log.values()].slice(-MAX_LOG_LINES);
    while (list.firstChild && list.firstChild.dataset.id !== events[0]?.id) list.firstChild.remove();
    for (const event of events.slice(list.children.length)) list.append(logLine(event));
    const isCut = this.#hasOlderLog || this.#log.size > MAX_LOG_LINES;
    setOptional(byId("log-more"), isCut ? `Older ones: windlass logs ${this.id}` : null);
    if (followsEnd) list.scrollTop = list.scrollHeight;
  }

  #renderCheckpoints() {
    byId("checkpoints-panel").hidden = this.#checkpoints.length === 0;
    byId("checkpoints").replaceChildren(
      ...this.#checkpoints.map((checkpoint) => {
        const item = make("li");
        const { train_loss, valid_loss } = checkpoint.metrics;
        const losses = [
          [train_loss, "loss"],
          [valid_loss, "validation"],
        ].filter(([value]) => value !== undefined);
        const figures = losses.map(([value, name]) => `${name} ${format.loss(value)}`);
        const { reasons, bytes } = checkpoint.windlass;
        if (reasons.length > 0) figures.push(reasons.join(", "));
        if (bytes !== null) figures.push(format.bytes(bytes));
        item.append(
          make("span", [`step ${format.whole(checkpoint.step_number)}`, ...figures].join(" · ")),
          make("code", checkpoint.fine_tuned_model_checkpoint),
        );
        return item;
      }),
    );
  }
}

/** Describes how long a job took, or how long it will still take, if known. */
export function timesOf({ job, finish }) {
  const startedAt = job.windlass.started_at;
  if (job.finished_at !== null && startedAt !== null) return `took ${format.duration(job.finished_at - startedAt)}`;
  const leftS = finish.at === null ? 0 : finish.at - Date.now() / 1000;
  if (job.status !== "running" || leftS <= 0) return ""; // a time in the past was a wrong estimate
  const left = `${format.duration(leftS)} left`;
  return finish.isEstimate ? `estimated: ${left}` : left;
}

/** Returns whether a request gives a setting. A group may leave all of its parts open. */
function isSaid(value) {
  return typeof value === "object" ? Object.values(value ?? {}).some(isSaid) : value !== undefined;
}

function logLine(event) {
  const line = make("li", "", event.level);
  line.dataset.id = event.id;
  const time = make("time", format.clock(event.created_at));
  time.dateTime = new Date(event.created_at * 1000).toISOString();
  time.title = format.dateTime(event.created_at);
  const level = LEVELS[event.level];
  line.append(time, make("span", level ? `${level}: ${event.message}` : event.message));
  return line;
}

function describe(name, { x, y }) {
  if (x.length === 0) return "";
  return `${name} from ${format.loss(y[0])} at step ${x[0]} to ${format.loss(y.at(-1))} at step ${x.at(-1)}.`;
}

const isOverBoxes = (job) => job.windlass.settings.boxes != null;

/** Returns the simulated step's trace; null if none was made. */
async function plannedTrace(id) {
  try {
    return await api.getTrace(api.plannedTimelineUrl(id));
  } catch (error) {
    if (error instanceof api.Refusal && error.status === 404) return null;
    throw error;
  }
}

/** The number of GPUs of a job, or null if it is one, as asked for. With "auto" its plan chooses it. */
function gpusOf({ settings: { gpus }, hyperparameters }) {
  if (gpus !== "auto") return gpus > 1 ? String(gpus) : null;
  return hyperparameters ? `${hyperparameters.gpus} (auto)` : "auto";
}
