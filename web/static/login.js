// What the address named before the login, such as a job, it names after it: a redirect keeps it.

const form = document.getElementById("login");
form.action = `/login${location.hash}`;
