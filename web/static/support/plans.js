// Requests for plans of jobs that do not exist. An answer may be a stream: first an estimate, then the plan
// without its advice, then all of it.

import { Refusal, request, responseOf } from "./api.js";

const PLANS = "/v1/fine_tuning/plans";
const MACHINES = "/v1/fine_tuning/machines";
const BUSY_MS = 400; // until a plan is asked for again while the caller's earlier one is still being made

const machines = new Map(); // those that were read by name

export const listModels = () => request("/v1/models");
export const listMachines = () => request(MACHINES);
/** Lists the published models that can be planned without their files. */
export const listShapes = () => request("/v1/fine_tuning/shapes");

/** Returns a machine by its name, such as `rtx4090:gpus=2,ram=128`. A name always means the same machine. */
export async function getMachine(name) {
  if (!machines.has(name)) machines.set(name, await request(`${MACHINES}/${encodeURIComponent(name)}`));
  return machines.get(name);
}

/**
 * Asks for a plan and returns it. `onEstimate` is called with an estimate, if one comes before, `onPlan` with the plan
 * while its advice lacks, `onProgress` with `message`, `done` and `total` while this machine's times for the model are
 * measured, and `onChanges` with the plan that has the rows of `what_if` so far and `num_changes_left`.
 *
 * The service makes one plan of a user at a time, so this waits for one that was asked for earlier. Throws Refusal for an
 * error of the service, AbortError once `signal` is aborted, TypeError if no service answers.
 */
export async function askForPlan(question, told) {
  for (;;) {
    try {
      return await ask(question, told);
    } catch (error) {
      if (error.code !== "plan_in_progress") throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
    signal.throwIfAborted();
  }
}

const post = (question, signal) =>
  responseOf(PLANS, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream, application/json" },
    body: JSON.stringify(question),
    signal,
  });

async function ask(question, { signal, onEstimate, onPlan, onProgress, onChanges }) {
  const response = await post({ ...question, stream: true }, signal);
  if (!response.headers.get("content-type")?.startsWith("text/event-stream")) return response.json();
  for await (const { event, data } of eventsOf(response.body)) {
    if (event === "fine_tuning.plan.estimate") onEstimate(data);
    else if (event === "fine_tuning.plan.without_advice") onPlan(data);
    else if (event === "fine_tuning.plan.progress") onProgress(data);
    else if (event === "fine_tuning.plan.changes") onChanges(data);
    else if (event === "fine_tuning.plan") return data;
    else if (event === "error") throw Refusal.of(response.status, data);
  }
  throw new TypeError("the stream ended without a plan");
}

/** Reads server-sent events whose data are JSON. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // The end of a line may come in the next part: "\r" stays until then.
      const parts = (text + value).replace(/\r\n/g, "\n").split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const fields = part.split("\n").map((line) => /^(\w+): ?(.*)$/.exec(line) ?? []);
        const valuesOf = (name) => fields.filter(([, key]) => key === name).map(([, , field]) => field);
        const data = valuesOf("data").join("\n");
        if (data) yield { event: valuesOf("event")[0] ?? "message", data: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
