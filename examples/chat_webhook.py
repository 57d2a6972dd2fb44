"""An extension that posts to a chat when a task fails, or when something else happens that the team wants to
know.

    # pyproject.toml of the package
    [project.entry-points."gpubroker.extensions"]
    chat = "chat_webhook:ChatWebhook"

    # config.yaml of gpubroker
    extensions:
      chat: {url: "https://chat.lab/hooks/abc", kinds: [task.failed, node.silent]}
"""

import json
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any

TIMEOUT_SECONDS = 5.0


class ChatWebhook:
    def start(self, options: Mapping[str, Any]) -> None:
        """Read the options: `url` is the address of the chat's incoming webhook, and `kinds` are the kinds of
        events to post. Raises KeyError without a `url`."""
        self._url = str(options["url"])
        self._kinds: Collection[str] = frozenset(options.get("kinds", ["task.failed"]))

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Post the event. Raises OSError if the chat does not take it."""
        if event["kind"] not in self._kinds:
            return
        text = f"{event['kind']}: {event['key']} of {event['tenant'] or 'the cluster'}"
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(  # the operator's own address
            self._url, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # the same
            pass

    def stop(self) -> None:
        """Nothing is open between two events."""
