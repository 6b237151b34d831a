// Requests to the service, and its answers.

const JOBS = "/v1/fine_tuning/jobs";

/** The service answered with an error. */
export class Refusal extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param; // the field of the request that is wrong, such as "windlass.clip_norm"
  }

  /** Makes a refusal of the body of an error. */
  static of(status, body) {
    const error = body?.error ?? body;
    return new Refusal(status, error?.message ?? `the service answered ${status}`, error ?? {});
  }
}

/** Returns a successful answer. Throws Refusal for an error of the service, TypeError if no service answers. */
export async function responseOf(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", ...options });
  if (response.status === 401) location.assign(`/login${location.hash}`); // the login or its key has expired
  if (!response.ok) throw Refusal.of(response.status, await response.json().catch(() => ({})));
  return response;
}

/** Returns the answer's JSON. Throws as `responseOf`. */
export async function request(path, options) {
  const response = await responseOf(path, options);
  return response.json().catch(() => ({}));
}

const job = (id) => `${JOBS}/${encodeURIComponent(id)}`;

export const listJobs = (limit, after) =>
  request(`${JOBS}?limit=${limit}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
export const getJob = (id) => request(job(id));
export const cancelJob = (id) => request(`${job(id)}/cancel`, { method: "POST" });
export const pauseJob = (id) => request(`${job(id)}/pause`, { method: "POST" });
export const resumeJob = (id) => request(`${job(id)}/resume`, { method: "POST" });
const box = (name) => `/v1/boxes/${encodeURIComponent(name)}`;

export const listBoxes = () => request("/v1/boxes");
export const drainBox = (name) => request(`${box(name)}/drain`, { method: "POST" });
export const resumeBox = (name) => request(`${box(name)}/resume`, { method: "POST" });
export const removeBox = (name) => request(`${box(name)}/remove`, { method: "POST" });
export const makeJoinCode = () => request("/v1/join_codes", { method: "POST" });
export const getMetrics = (id) => request(`${job(id)}/metrics`);
export const listMessages = (id, limit) => request(`${job(id)}/events?type=message&limit=${limit}`);
export const listCheckpoints = (id) => request(`${job(id)}/checkpoints?limit=100`);
export const getStorage = (id) => request(`${job(id)}/storage`);
export const getFile = (id) => request(`/v1/files/${encodeURIComponent(id)}`);
export const getPlan = (id) => request(`${job(id)}/plan`);
/** The URLs of the last held step's timeline, and of the simulated step's. */
export const timelineUrl = (id) => `${job(id)}/timeline`;
export const plannedTimelineUrl = (id) => `${job(id)}/plan/timeline`;
export const getTrace = (url) => request(url);

export const fileContentUrl = (id) => `/v1/files/${encodeURIComponent(id)}/content`;

/**
 * Follows the events of all jobs after the ordinal `after`, each once and in order.
 *
 * The browser reconnects by itself and names the last event it received; the service continues from there. `onLost` is
 * called if that fails: the connection was refused for good, or ordinals went back, as after a change of database.
 */
export function followEvents({ after, onEvent, onConnected, onBroken, onLost }) {
  let last = after;
  const source = new EventSource(`/v1/events/stream?after=${after}`);
  const giveUp = () => {
    source.close();
    onLost();
  };
  source.onopen = onConnected;
  source.onerror = () => (source.readyState === EventSource.CLOSED ? giveUp() : onBroken());
  source.onmessage = (message) => {
    const ordinal = Number(message.lastEventId);
    if (ordinal <= last) {
      giveUp();
      return;
    }
    last = ordinal;
    onEvent(JSON.parse(message.data), ordinal);
  };
}
