// The dashboard: reads the jobs once, then follows one stream of events for as long as the page is open.

import * as api from "./support/api.js";
import { curl, jsonBody } from "./support/commands.js";
import { Boxes } from "./views/boxes.js";
import { Detail, timesOf } from "./views/detail.js";
import { byId, installCopyButtons, setBadge, setOptional, setText } from "./support/dom.js";
import * as format from "./support/format.js";
import { PlanPage } from "./views/plan_page.js";
import { Jobs, TERMINAL, boxesOf, missingFrom, nameOf, progressOf, reasonOf } from "./views/jobs.js";

const PAGE_SIZE = 50;
const RETRY_MS = 1000;
const RENDER_DELAY_MS = 80;
const AWAY_AFTER_MS = 2500;
const LOOK_MS = 5000; // for changes without an event: deleted jobs, and jobs that wait for space on a full disk
const BOXES_MS = 2000; // between readings of the boxes while their page is shown
const ROUTE = /^#\/jobs\/([^/]+)$/;
const BOXES_ROUTE = "#/boxes";
const PLAN_ROUTE = "#/plan"; // a query follows: the settings

const jobs = new Jobs();
const boxes = new Boxes();
const planPage = new PlanPage(PLAN_ROUTE);
const detail = new Detail(jobs, () => boxes.areSeveral);
const wide = matchMedia("(min-width: 900px)");
const items = new Map(); // job id: its element in the list
const reading = new Set(); // jobs being read again
const stale = new Set(); // jobs to be read again after that, or once the service answers
let hasStarted = false;
let renderTimer = null;
let awayTimer = null;

// --- the service ---

async function start() {
  for (;;) {
    try {
      const page = await api.listJobs(PAGE_SIZE);
      jobs.replace(page);
      api.followEvents({
        after: page.windlass.last_event_ordinal,
        onEvent,
        onConnected,
        onBroken: () => setConnection("reconnecting"),
        onLost: () => {
          setConnection("reconnecting");
          setTimeout(start, RETRY_MS);
        },
      });
      break;
    } catch {
      setConnection("reconnecting");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
  hasStarted = true;
  boxes.read().then(renderSoon);
  detail.show(null); // its data may be of another database
  selectSomething();
  detail.show(selectedId());
  render();
}

function onEvent(event, ordinal) {
  if (jobs.apply(event)) readAgain(event.job_id);
  if (event.job_id === detail.id) detail.apply(event, ordinal);
  if (isBoxesPage() && event.type !== "metrics") boxes.read();
  renderSoon();
}

function onConnected() {
  setConnection("connected");
  for (const id of stale) readAgain(id);
  if (detail.hasFailed) detail.show(detail.id);
}

/** Reads a job, and again if that was requested meanwhile. If the service is unreachable, reads it when it is back. */
async function readAgain(id) {
  stale.add(id);
  if (reading.has(id)) return;
  reading.add(id);
  try {
    while (stale.delete(id)) jobs.put(await api.getJob(id));
    if (selectSomething()) detail.show(selectedId());
  } catch (error) {
    if (error instanceof api.Refusal && error.status === 404) forget(id);
    else stale.add(id);
  } finally {
    reading.delete(id);
    renderSoon();
  }
}

function forget(id) {
  jobs.remove(id);
  if (id === detail.id) detail.show(id); // reports that the job is gone
}

async function lookForChangesWithoutEvents() {
  if (!hasStarted || document.hidden) return;
  const known = jobs.ids();
  const page = await api.listJobs(PAGE_SIZE).catch(() => null);
  for (const id of page ? missingFrom(page, known) : []) readAgain(id);
  // A job on a full disk waits without an event, because no event can be stored. Progress of a preparation is no event.
  for (const job of page?.data ?? []) {
    const shown = jobs.get(job.id)?.job.windlass;
    if (shown && ["waiting_reason", "preparation", "box"].some((name) => hasChanged(shown[name], job.windlass[name])))
      readAgain(job.id);
  }
}

const hasChanged = (before, now) => (before?.summary ?? before) !== (now?.summary ?? now);

function setConnection(state) {
  const element = byId("connection");
  if (element.textContent === state) return; // the browser reports each of its attempts to connect
  setText(element, state);
  element.dataset.state = state;
  clearTimeout(awayTimer);
  if (state === "connected") byId("away").hidden = true;
  else awayTimer = setTimeout(() => (byId("away").hidden = false), AWAY_AFTER_MS);
}

// --- the selected job, or the boxes ---

const isBoxesPage = () => location.hash === BOXES_ROUTE;
const isPlanPage = () => location.hash.split("?")[0] === PLAN_ROUTE;
const isJobsPage = () => !isBoxesPage() && !isPlanPage();

function selectedId() {
  const match = ROUTE.exec(location.hash);
  return match && decodeURIComponent(match[1]);
}

/** On a wide screen without a selection, selects a running job, else the newest. Returns whether it selected one. */
function selectSomething() {
  if (!wide.matches || selectedId() !== null || !isJobsPage()) return false;
  const entries = jobs.list();
  const entry = entries.find(({ job }) => job.status === "running") ?? entries[0];
  if (entry) history.replaceState(null, "", `#/jobs/${encodeURIComponent(entry.job.id)}`);
  return entry !== undefined;
}

function onRoute() {
  if (!hasStarted) return;
  selectSomething();
  detail.show(selectedId());
  render();
  if (!wide.matches) scrollTo(0, 0);
}

// --- the page ---

function renderSoon() {
  renderTimer ??= setTimeout(render, RENDER_DELAY_MS);
}

function render() {
  clearTimeout(renderTimer);
  renderTimer = null;
  if (!hasStarted) return;
  const entries = jobs.list();
  const showsJobs = isJobsPage();
  const isEmpty = entries.length === 0 && selectedId() === null;
  byId("empty").hidden = !isEmpty || !showsJobs;
  byId("board").hidden = isEmpty || !showsJobs;
  boxes.show(isBoxesPage());
  planPage.show(isPlanPage());
  setCurrent(byId("to-jobs"), showsJobs);
  setCurrent(byId("to-boxes"), isBoxesPage());
  setCurrent(byId("to-plan"), isPlanPage());
  byId("older").hidden = !jobs.hasOlder;
  document.body.dataset.view = selectedId() === null ? "list" : "detail";
  renderList(entries);
  detail.render();
  document.title = showsJobs ? titleOf(jobs.get(selectedId())) : `${isBoxesPage() ? "Boxes" : "Plan"} · windlass`;
}

function setCurrent(link, isCurrent) {
  if (isCurrent) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}

function renderList(entries) {
  const list = byId("jobs");
  const shown = new Set(entries.map(({ job }) => job.id));
  for (const [id, item] of items) {
    if (shown.has(id)) continue;
    item.remove();
    items.delete(id);
  }
  entries.forEach((entry, index) => {
    const { id } = entry.job;
    if (!items.has(id)) items.set(id, byId("job-item").content.firstElementChild.cloneNode(true));
    const item = items.get(id);
    renderItem(item, entry);
    if (list.children[index] !== item) list.insertBefore(item, list.children[index] ?? null);
  });
}

function renderItem(item, entry) {
  const { job, metrics } = entry;
  const link = item.firstElementChild;
  const part = (name) => item.querySelector(name);
  const { step, total } = progressOf(entry);
  link.href = `#/jobs/${encodeURIComponent(job.id)}`;
  link.dataset.job = job.id;
  if (job.id === selectedId()) link.setAttribute("aria-current", "true");
  else link.removeAttribute("aria-current");
  setText(part(".job-name"), nameOf(job));
  setBadge(part(".badge"), job.status);
  const about = [nameOf(job) !== job.model && job.model, shortId(job.id), boxes.areSeveral && boxesOf(job)];
  setText(part(".job-model"), about.filter(Boolean).join(" · "));
  const bar = part("progress");
  bar.hidden = !total || job.status === "succeeded" || (step === 0 && job.status !== "running");
  bar.max = total ?? 1;
  bar.value = step;
  bar.setAttribute("aria-label", `Progress of ${nameOf(job)} (${shortId(job.id)})`);
  bar.dataset.status = job.status;
  const all = `${format.whole(total)} ${total === 1 ? "step" : "steps"}`;
  const isUnfinished = ["cancelled", "failed"].includes(job.status); // shows its steps even without a bar
  const figures = [
    total && (bar.hidden && !isUnfinished ? all : `${format.whole(step)}/${format.whole(total)}`),
    metrics && `loss ${format.loss(metrics.train_loss)}`,
    job.status === "running" && metrics?.tokens_per_s != null && `${format.rate(metrics.tokens_per_s)} tok/s`,
    timesOf(entry),
  ];
  const unbroken = figures.filter(Boolean).map((figure) => figure.replaceAll(" ", "\u00a0"));
  setOptional(part(".job-figures"), unbroken.join("\u00a0· "));
  setOptional(part(".job-reason"), job.error ? job.error.message : reasonOf(entry));
  part(".job-reason").dataset.level = job.error ? "error" : "info";
}

const shortId = (id) => (id.length > 15 ? `${id.slice(0, 14)}…` : id);

function titleOf(entry) {
  if (!entry) return "windlass";
  const { step, total } = progressOf(entry);
  const state = entry.job.status === "running" && total ? `${Math.floor((100 * step) / total)} %` : entry.job.status;
  return `${state.replaceAll("_", " ")} · ${nameOf(entry.job)} (${shortId(entry.job.id)}) · windlass`;
}

// --- actions of the user ---

async function showOlder() {
  const button = byId("older");
  button.disabled = true;
  try {
    const page = await api.listJobs(PAGE_SIZE, jobs.list().at(-1)?.job.id);
    jobs.append(page);
  } catch {
    setText(button, "The service did not answer; try again");
    return;
  } finally {
    button.disabled = false;
  }
  setText(button, "Show older jobs");
  render();
}

function askToCancel() {
  const entry = jobs.get(detail.id);
  const dialog = byId("cancel-dialog");
  dialog.dataset.job = detail.id;
  const isTraining = ["running", "pausing"].includes(entry.job.status);
  const consequence = isTraining ? "It ends after its current step, and what it has learnt is lost." : "It will not train.";
  setText(byId("cancel-text"), `${nameOf(entry.job)} (${entry.job.id}). ${consequence}`);
  setOptional(byId("cancel-error"), null);
  dialog.showModal();
}

async function cancel() {
  const dialog = byId("cancel-dialog");
  const button = byId("cancel-confirm");
  button.disabled = true;
  try {
    jobs.put(await api.cancelJob(dialog.dataset.job));
    dialog.close();
    render();
  } catch (error) {
    const problem = error instanceof api.Refusal ? error.message : "The service did not answer; try again.";
    setOptional(byId("cancel-error"), problem);
  } finally {
    button.disabled = false;
  }
}

async function pauseOrResume() {
  const { id } = detail;
  const change = jobs.get(id).job.status === "paused" ? api.resumeJob : api.pauseJob;
  let problem = null;
  try {
    jobs.put(await change(id));
    render();
  } catch (error) {
    problem = error instanceof api.Refusal ? error.message : "The service did not answer; try again.";
  }
  if (detail.id === id) setOptional(byId("pause-error"), problem);
}

function skipToDetail(event) {
  event.preventDefault(); // the address must keep naming the selected job
  byId(isBoxesPage() ? "boxes" : isPlanPage() ? "planner" : "detail").focus();
}

byId("empty-curl").textContent = [
  curl("/v1/files", "-F purpose=fine-tune -F file=@train.jsonl"),
  curl("/v1/fine_tuning/jobs", ...jsonBody('{"model": "MODEL", "training_file": "FILE_ID"}')),
].join("\n");
installCopyButtons();
byId("older").addEventListener("click", showOlder);
byId("pause").addEventListener("click", pauseOrResume);
byId("cancel").addEventListener("click", askToCancel);
byId("cancel-confirm").addEventListener("click", cancel);
document.querySelector(".skip").addEventListener("click", skipToDetail);
addEventListener("hashchange", onRoute);
// The remaining time decreases between steps.
setInterval(() => jobs.list().some(({ job }) => !TERMINAL.has(job.status)) && renderSoon(), 1000);
setInterval(lookForChangesWithoutEvents, LOOK_MS);
setInterval(() => hasStarted && !document.hidden && isBoxesPage() && boxes.read(), BOXES_MS);
setConnection("connecting");
start();
