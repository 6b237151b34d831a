// The address keeps its fragment, such as a job, over the login, because a redirect keeps it.

const form = document.getElementById("login");
form.action = `/login${location.hash}`;
