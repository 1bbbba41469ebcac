"""Settings: which source wins, what is refused and how the refusal reads, and that every list of settings agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.app.config import DEFAULT, ConfigFile, read_file, resolve
from paceline.app.kinds import class_table
from paceline.app.settings import TABLE, Settings
from paceline.errors import ConfigError


def file_of(**tables: object) -> ConfigFile:
    return ConfigFile(Path("/etc/paceline/paceline.toml"), tables)


def test_nothing_given_is_all_defaults() -> None:
    resolved = resolve({})
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {DEFAULT}
    assert set(resolved.origins) == set(TABLE)


@given(st.sets(st.sampled_from(["flag", "file", "environment"])))
def test_the_strongest_source_wins(sources: set[str]) -> None:
    resolved = resolve(
        {"port": "1"} if "flag" in sources else {},
        file_of(serve={"port": 2}) if "file" in sources else None,
        {"PACELINE_PORT": "3"} if "environment" in sources else {},
    )
    expected = [
        ("flag", 1, "--port"),
        ("file", 2, "/etc/paceline/paceline.toml: serve.port"),
        ("environment", 3, "PACELINE_PORT"),
    ]
    port, origin = next(((port, origin) for name, port, origin in expected if name in sources), (8000, DEFAULT))
    assert (resolved.settings.serve.port, resolved.origins["port"]) == (port, origin)


def test_sources_mix_setting_by_setting() -> None:
    settings = resolve(
        {"port": "81"}, file_of(serve={"host": "::1"}, kv={"kv_gib": 2}), {"PACELINE_LOG_FORMAT": "json"}
    ).settings
    assert (settings.serve.port, settings.serve.host) == (81, "::1")
    assert (settings.kv.kv_gib, settings.log.log_format) == (2.0, "json")


@pytest.mark.parametrize(
    ("flags", "file", "environ", "message"),
    [
        ({"port": "70000"}, None, {}, "--port: '70000' is not accepted; expected a whole number from 0 to 65535"),
        ({}, file_of(serve={"port": True}), {}, "serve.port: True is not accepted; expected a whole number"),
        ({}, file_of(serve={"port": 80.5}), {}, "serve.port: 80.5 is not accepted"),
        ({}, file_of(kv={"kv_gib": "nan"}), {}, "kv.kv_gib: 'nan' is not accepted; expected a number over 0"),
        ({}, None, {"PACELINE_KV_SHARE": "1.5"}, "PACELINE_KV_SHARE: '1.5' is not accepted; expected a number over 0"),
        ({}, None, {"PACELINE_DTYPE": "int8"}, "expected one of auto, float32, bfloat16, float16"),
        ({"policy": "fifo"}, None, {}, "--policy: 'fifo' is not accepted; expected one of decode_first"),
        ({"policy_options": "knob"}, None, {}, "--policy-options: 'knob' is not accepted; expected a table of options"),
        ({"policy_options": "knob=1"}, None, {}, "--policy-options: policy slo has no option 'knob'"),
        ({}, file_of(serve={"restart": "maybe"}), {}, "serve.restart: 'maybe' is not accepted; expected true or false"),
        ({}, file_of(serve={"cors_origins": 3}), {}, "expected a list of texts"),
        ({"model": " "}, None, {}, "--model: ' ' is not accepted; expected text"),
        ({}, file_of(server={"port": 1}), {}, "unknown table [server]; did you mean serve?"),
        ({}, file_of(serve={"prot": 1}), {}, "unknown key serve.prot; did you mean port?"),
        ({}, file_of(serve={"kv_gib": 1}), {}, "unknown key serve.kv_gib"),
        ({}, file_of(port=1), {}, "unknown table [port]"),
        ({}, file_of(serve=1), {}, "serve must be a table, written [serve]"),
        ({}, file_of(auth={"api_key": "s3cret"}), {}, "unknown key auth.api_key"),
        ({"tls_cert": "a.pem"}, None, {}, "--tls-cert: tls_cert needs tls_key beside it"),
        ({}, None, {"PACELINE_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks"),
        ({}, file_of(kv={"kv_gib": 10**400}), {}, "kv.kv_gib: 1000"),
        ({"kv_gib": "1e300"}, None, {}, "--kv-gib: 1e300 is too large; no size or time is over 1e+15"),
        ({"max_num_seqs": str(10**30)}, None, {}, "is too large; no number of things is over 2147483647"),
        ({"threads": "5000"}, None, {}, "--threads: '5000' is not accepted; expected a whole number from 1 to 1024"),
        (
            {},
            None,
            {"PACELINE_MODEL": "\udcff\udcfe"},
            "PACELINE_MODEL: '\\udcff\\udcfe' is not accepted; expected text",
        ),
        ({}, None, {"PACELINE_API_KEY": "\udcff"}, "PACELINE_API_KEY: the value is not accepted; expected text"),
        ({"model": "a\0b"}, None, {}, "--model: 'a\\x00b' is not accepted"),
        ({}, file_of(scheduler={"policy_options": [1]}), {}, "scheduler.policy_options: [1] is not accepted"),
        ({}, file_of(scheduler={"policy_options": [[1, 2, 3]]}), {}, "scheduler.policy_options: [[1, 2, 3]] is not"),
        ({}, None, {"PACELINE_CLASSES": "[" * 100_000}, "PACELINE_CLASSES: '[[["),
        ({}, file_of(scheduler={"classes": {"interactive": {"ttft_ms": 10**400}}}), {}, "ttft_ms is 1000"),
        (
            {"classes": '{"chat": {"ttft_ms": -3}}'},
            None,
            {},
            "--classes: class 'chat': ttft_ms is -3; it must be a number",
        ),
        ({"classes": '{"chat": {"priority": 1.5}}'}, None, {}, "priority is 1.5; it must be a whole number"),
        ({"classes": '{"chat": {"queue_limit": -1}}'}, None, {}, "queue_limit is -1; it must be a whole number, 0 or"),
        ({"classes": '{"chat": {"weight": null}}'}, None, {}, "weight is None; it must be a finite number above 0"),
        (
            {"classes": '{"chat": {"percentile": 95}}'},
            None,
            {},
            "percentile is 95; it must be a number between 0 and 1",
        ),
        (
            {"classes": '{"chat": {"overload": "drop"}}'},
            None,
            {},
            "overload is 'drop'; it must be one of relegate, reject",
        ),
        (
            {"classes": '{"chat": {"ttft_s": 1}}'},
            None,
            {},
            "class 'chat' has no setting 'ttft_s'; known: priority, ttft_ms",
        ),
        (
            {"classes": '{"standard": {"e2e_ms": 100}}'},
            None,
            {},
            "100 ms to the last token is less than 5000 ms to the first",
        ),
        (
            {"classes": '{"batch": {"itl_ms": 3, "e2e_ms": 2}}'},
            None,
            {},
            "2 ms to the last token is less than 3 ms between",
        ),
        ({}, file_of(scheduler={"classes": {"interactive": {"ttft_ms": float("inf")}}}), {}, "ttft_ms is inf; it must"),
        ({}, file_of(scheduler={"classes": {"a\nb": {}}}), {}, "class 'a\\nb': a class is named by up to 64 letters"),
        ({}, file_of(scheduler={"default_class": "gold"}), {}, "scheduler.default_class: there is no class 'gold'; it"),
        ({}, file_of(auth={"api_key_file": "~no such user/k"}), {}, "auth.api_key_file: '~no such user/k': Could not"),
    ],
)
def test_a_bad_value_is_one_line_with_its_source(
    flags: dict[str, object], file: ConfigFile | None, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolve(flags, file, environ)
    assert "\n" not in str(caught.value)


def test_a_promise_of_a_built_in_class_can_be_taken_away() -> None:
    for none in ("none", None):
        tables = {"interactive": {"itl_ms": none, "queue_limit": none}, "standard": {"ttft_ms": none, "itl_ms": none}}
        classes = resolve({}, file_of(scheduler={"classes": tables})).settings.scheduler.classes
        assert [(one.ttft_s, one.itl_s) for one in classes] == [(1.0, None), (None, None), (None, None)]
        tables = {one.name: class_table(one) for one in classes}
        assert (tables["interactive"]["itl_ms"], "itl_ms" in tables["batch"]) == ("none", False)
        assert resolve({}, file_of(scheduler={"classes": tables})).settings.scheduler.classes == classes


def test_a_secret_comes_from_the_environment_and_is_not_repeated() -> None:
    assert resolve({}, None, {"PACELINE_API_KEY": "s3cret"}).settings.auth.api_key == "s3cret"
    with pytest.raises(ConfigError) as caught:
        resolve({}, None, {"PACELINE_API_KEY": "  "})
    assert "PACELINE_API_KEY: the value is not accepted" in str(caught.value)


def test_environment_typos_warn_and_empty_variables_count_as_unset() -> None:
    resolved = resolve({}, None, {"PACELINE_PROT": "1", "PACELINE_PORT": "", "HOME": "/"})
    assert resolved.settings == Settings()
    assert resolved.warnings == ("PACELINE_PROT is set and is no setting; did you mean PACELINE_PORT?",)


def test_paths_in_a_file_are_relative_to_it() -> None:
    file = file_of(
        auth={"api_key_file": "keys.toml"}, model={"model": "./weights"}, serve={"tls_cert": "/c", "tls_key": "k"}
    )
    settings = resolve({}, file).settings
    assert settings.auth.api_key_file == "/etc/paceline/keys.toml"
    assert settings.model.model == "/etc/paceline/weights"
    assert (settings.serve.tls_cert, settings.serve.tls_key) == ("/c", "/etc/paceline/k")
    assert resolve({"api_key_file": "keys.toml", "model": "smollm2-135m"}).settings.auth.api_key_file == "keys.toml"


@given(
    st.sampled_from(sorted(TABLE)),
    st.one_of(
        st.text(st.characters(), max_size=12),
        st.integers(),
        st.integers(-(10**400), 10**400),
        st.floats(),
        st.none(),
        st.booleans(),
        st.recursive(
            st.integers() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        ),
    ),
)
def test_any_value_is_taken_or_refused_by_name(name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    try:
        origin = resolve({name: value}).origins[name]
    except ConfigError as error:
        origin = str(error).partition(":")[0]
    assert origin == (DEFAULT if value is None else flag)


def test_the_file_is_found_read_and_refused(tmp_path: Path) -> None:
    assert read_file(None, tmp_path) is None
    (tmp_path / "paceline.toml").write_text("[serve]\nport = 1\n")
    found = read_file(None, tmp_path)
    assert found is not None
    assert resolve({}, found).settings.serve.port == 1
    (tmp_path / "broken.toml").write_text("[serve\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        read_file(str(tmp_path / "broken.toml"), tmp_path)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_file(str(tmp_path / "deep.toml"), tmp_path)
    with pytest.raises(ConfigError, match="cannot read the configuration file ~no such user"):
        read_file("~no such user/paceline.toml", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*absent\.toml: No such file"):
        read_file(str(tmp_path / "absent.toml"), tmp_path)
