"""Commands for webhooks: HTTP calls to a URL when jobs end."""

from datetime import datetime
from typing import Annotated, Any

import typer

from windlass.service.cli.service import Home
from windlass.service.cli.table import print_columns
from windlass.service.installation import load_settings, open_client

_PREFIX = "fine_tuning.job."
_Id = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id, as `windlass webhooks list` shows it.")]


def create(
    url: Annotated[str, typer.Argument(help="The URL to call: https://…")],
    name: Annotated[str | None, typer.Option(help="The webhook's name in lists (default: its URL).")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(help="An event to send: succeeded, failed or cancelled; may be repeated (default: all)."),
    ] = None,
    home: Home = None,
) -> None:
    """Call a URL whenever a job ends; prints the secret that signs the calls, only this once."""
    with open_client(load_settings(home)) as client:
        types = [_PREFIX + each for each in event] if event else client.webhook_event_types()
        made = client.create_webhook(name=name or url[:255], url=url, event_types=types)
    print(made["signing_secret"])
    # To stderr, so that a script reads only the secret.
    typer.echo(f"{made['id']} receives {_short(made)}. Keep the secret: it is not shown again.", err=True)


def list_(home: Home = None) -> None:
    """List webhooks, with the result of the last delivery."""
    with open_client(load_settings(home)) as client:
        found = [client.webhook(each["id"]) for each in client.webhooks()]
    if not found:
        print("no webhooks yet; make one with `windlass webhooks create`")
        return
    rows = [(each["id"], each["name"], each["url"], _short(each), _last_delivery(each)) for each in found]
    print_columns([("webhook", "name", "url", "events", "last delivery"), *rows])
    for each in found:
        if remark := each["windlass"].get("signing_secret_error"):
            print(f"! {remark}")


def send_sample(webhook: _Id, home: Home = None) -> None:
    """Send a sample event now."""
    with open_client(load_settings(home)) as client:
        event_type = client.webhook(webhook)["event_types"][0]
        answered = client.test_webhook(webhook, event_type)
    print(f"the sample was answered with {answered['status_code']}")


def delete(webhook: _Id, home: Home = None) -> None:
    """Delete a webhook and its pending deliveries."""
    with open_client(load_settings(home)) as client:
        client.delete_webhook(webhook)
    print(f"{webhook} is deleted")


def _short(webhook: dict[str, Any]) -> str:
    return ", ".join(each.removeprefix(_PREFIX) for each in webhook["event_types"])


def _last_delivery(webhook: dict[str, Any]) -> str:
    deliveries = webhook["windlass"]["deliveries"]
    if not deliveries:
        return "none yet"
    last = deliveries[0]
    if last["delivered_at"] is not None:
        return f"arrived {_time(last['delivered_at'])}"
    if last["next_try_at"] is None:
        return f"given up: {last['last_error']}"
    return f"next try {_time(last['next_try_at'])}" + (f": {last['last_error']}" if last["last_error"] else "")


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
