"""`paceline key new`: make an API key. The file gets its digest; the key itself is shown once and kept nowhere."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.errors import ConfigError


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Make API keys.", no_args_is_help=True)
    group.command("new")(new)
    # A second command will join; until then a callback keeps `new` a word of its own.
    group.callback()(lambda: None)
    app.add_typer(group, name="key")


def new(
    name: Annotated[str, typer.Argument(help="What logs and metrics call whoever uses it.")],
    tenant: Annotated[str | None, typer.Option(help="Whom it belongs to.")] = None,
    classes: Annotated[
        str | None, typer.Option(help="Classes of traffic it may use, with commas; all if none.")
    ] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most requests a minute.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Most requests at once.")] = None,
) -> None:
    """Print a new key on stderr, once, and on stdout its entry for the --api-key-file."""
    from paceline.serve.keys import hash_key, new_key, read_key_file

    secret = new_key()
    entry = {
        "name": name,
        "sha256": hash_key(secret),
        "tenant": tenant,
        "classes": None if classes is None else [one.strip() for one in classes.split(",")],
        "requests_per_minute": requests_per_minute,
        "max_concurrent": max_concurrent,
    }
    text = "[[key]]\n" + "".join(f"{field} = {_toml(value)}\n" for field, value in entry.items() if value is not None)
    try:
        read_key_file(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("the key file, key 1", "this key")) from None
    print(f"key (shown this once): {secret}", file=sys.stderr)
    print(text, end="")


def _toml(value: object) -> str:
    """A TOML value: text and lists of text are written as JSON writes them."""
    import json

    return json.dumps(value, ensure_ascii=False)
