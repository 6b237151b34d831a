// What the page knows of all jobs: read from the service once, then kept true by events.

export const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);

export class Jobs {
  #order = []; // ids, newest first
  #jobs = new Map();
  hasOlder = false;

  /** Start over from the list's first page. */
  replace(page) {
    this.#order = [];
    this.#jobs.clear();
    this.append(page);
  }

  /** Add an older page. */
  append(page) {
    for (const job of page.data) {
      if (!this.#order.includes(job.id)) this.#order.push(job.id);
      this.put(job);
    }
    this.hasOlder = page.has_more;
  }

  /** Take in a job as the service has it now. */
  put(job) {
    const known = this.#jobs.get(job.id);
    // The stream brings metrics in order; an answer may overtake it or fall behind.
    const metrics = known ? known.metrics : job.windlass.last_metrics;
    // Until an attempt's first step is told of, what is left is as the service has it.
    const told = known?.job.windlass.attempt === job.windlass.attempt ? known.finish : null;
    const finish = told ?? { at: job.estimated_finish, isEstimate: job.windlass.finish_is_estimate };
    // What an evaluation alone does not tell of.
    const timeline = known?.timeline ?? metrics?.timeline ?? null;
    const measured = known?.measured ?? metrics?.measured ?? null;
    this.#jobs.set(job.id, { job, metrics, timeline, measured, finish, message: known?.message ?? null });
  }

  remove(id) {
    this.#order = this.#order.filter((other) => other !== id);
    this.#jobs.delete(id);
  }

  get(id) {
    return this.#jobs.get(id);
  }

  /** Of all that are known, newest first. */
  ids() {
    return [...this.#order];
  }

  /** All that are known, newest first. */
  list() {
    return this.#order.map((id) => this.#jobs.get(id)).filter(Boolean);
  }

  /** Take in an event. True if the job has to be read again, as more than its metrics changed or is to be settled. */
  apply(event) {
    const known = this.#jobs.get(event.job_id);
    if (!known) {
      if (event.data.status === "validating_files" && !this.#order.includes(event.job_id)) {
        this.#order.unshift(event.job_id);
      }
      return true;
    }
    if (event.type !== "metrics") {
      known.message = event.message;
      return true;
    }
    const { data } = event;
    const sameStep = known.metrics?.step === data.step;
    known.metrics = sameStep ? { ...known.metrics, ...data } : data;
    known.timeline = data.timeline ?? known.timeline;
    known.measured = data.measured ?? known.measured;
    if (data.remaining_s !== undefined) {
      const at = data.remaining_s === null ? null : event.created_at + data.remaining_s;
      known.finish = { at, isEstimate: data.remaining_is_estimate ?? true };
    }
    if (data.ssd_bytes_written_step_by_ssd == null) return false;
    // The forecast of wear comes with the job. It settles: read at steps 1, 2, 4, 8, … it is never far off.
    return known.job.windlass.ssd_wear === null || Number.isInteger(Math.log2(data.step));
  }
}

/** Of jobs that were known before the list's first page was read, those that it should have and has not. */
export function missingFrom(page, known) {
  const there = new Set(page.data.map((job) => job.id));
  const end = page.has_more ? known.indexOf(page.data.at(-1).id) : -1; // what comes after is on other pages
  return known.slice(0, end === -1 ? known.length : end).filter((id) => !there.has(id));
}

/** What a job is called: its suffix, else its model without the organization. */
export const nameOf = (job) => job.suffix || job.model.split("/").at(-1);

/** Steps done and steps in all; the second is null until the files have been read. */
export function progressOf({ job, metrics }) {
  return { step: metrics?.step ?? job.windlass.step, total: metrics?.total_steps ?? job.windlass.total_steps };
}

/** Why nothing seems to happen, in words; null for a job that trains or is finished. */
export function reasonOf({ job, metrics, message }) {
  if (TERMINAL.has(job.status)) return null;
  if (job.windlass.cancel_requested) return "Cancelling: it ends after its step";
  if (job.windlass.waiting_reason) return `Waiting: ${job.windlass.waiting_reason}`;
  switch (job.status) {
    case "validating_files":
      return job.windlass.preparation?.summary ?? "Checking the model and reading the files";
    case "queued":
      return "Waiting for its turn";
    case "running":
      return metrics ? null : (message ?? "Starting");
    case "pausing":
      return "Pausing: it ends its attempt after its step";
    case "paused":
      return "Paused: it holds no GPU and no memory";
    default:
      return null;
  }
}
