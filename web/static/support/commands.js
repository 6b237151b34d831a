// Commands that the user copies into a shell.

const needsKey = "needsKey" in document.body.dataset;

/** The lines of a curl command: to `path`, with further arguments, each on its line. */
export function curl(path, ...rest) {
  const key = needsKey ? [`-H "Authorization: Bearer $WINDLASS_API_KEY"`] : [];
  return [`curl ${location.origin}${path}`, ...key, ...rest].join(" \\\n  ");
}

/** The arguments of a curl command that sends JSON. */
export const jsonBody = (value, indent) => [
  "-H 'Content-Type: application/json'",
  `-d ${quoted(typeof value === "string" ? value : JSON.stringify(value, null, indent))}`,
];

/** An argument as a shell reads it. */
export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);
