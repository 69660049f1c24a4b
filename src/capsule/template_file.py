"""A template's file: YAML, checked, and written for images that were built or imported.

capsule/templates/python.yaml explains every key.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from dataclasses import replace as changed
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from capsule.config import check_limit
from capsule.errors import ConflictError, InvalidError
from capsule.host_errors import host_error, is_scarce
from capsule.model import SUDO_FOLDER, SYSTEM_PATH, Language, Limits, Template, User
from capsule.settings import about, brief, check, unknown

CARRY_KINDS = ("sh", "python", "node")
NETWORKS = ("none",)

SUFFIXES = (".yaml", ".yml")
_MAX_FILE = 256 * 1024
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)
_LANGUAGE_NAME = re.compile(r"[a-z0-9][a-z0-9.+#_-]{0,63}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ROOT = re.compile(r"host|dir:/.*|image:[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/@:-]{0,254}", re.ASCII)
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PROFILE = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_USER = re.compile(r"(?!root$|nobody$)[a-z_][a-z0-9_-]{0,31}", re.ASCII)
_HOME = re.compile(r"/workspace|/home/[a-z_][a-z0-9_-]{0,31}", re.ASCII)
_LANGUAGE_KEYS = ("file", "command", "carry", "aliases")
_TTL = about("seconds", "life of a sandbox", low=1.0)
_MOST = Limits(2**50, 4096.0, 2**22, 2**60, 2**40, 2**20)  # what makes sense, not what is allowed


def read_template(file: Path) -> Template:
    """One template. Raises InvalidError."""
    return read_document(file).template()


def write_template(folder: Path, template: Template, *, replace: bool = False) -> Path:
    """Write `template` as `folder`/NAME.yaml, whole or not at all.

    Raises ConflictError when there is one already and `replace` is not given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{template.name}.yaml"
    text = yaml.safe_dump(as_mapping(template), sort_keys=False, allow_unicode=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".yaml")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write("# Written for an image that was built or imported; yours to edit.\n" + text)
            os.fchmod(handle, 0o644)
        read_template(Path(temporary))  # what we write we can read
        if replace:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
    except FileExistsError:
        raise ConflictError(
            f"template {template.name} exists already: {target}",
            hint="choose another name, or remove that file",
        ) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def as_mapping(template: Template) -> dict[str, Any]:
    """The template as its YAML file says it; `read_template` gives the same value again."""
    limits = {f.name: getattr(template.limits, f.name) for f in fields(template.limits)}
    languages: dict[str, dict[str, Any]] = {}
    for key, language in template.languages.items():
        entry = languages.setdefault(language.name, {"aliases": []})
        if key != language.name:
            entry["aliases"].append(key)
        entry.update(file=language.filename, command=list(language.command))
        if language.carry:
            entry["carry"] = language.carry
    engine = {"image": template.image, "runtime": template.runtime}
    user = {"name": template.user.name, "home": template.user.home}
    begun = {"prepare": template.prepare, "start": template.start, "ready": template.ready}
    return {
        "name": template.name,
        "description": template.description,
        "root": template.root,
        **{key: value for key, value in engine.items() if value},
        "needs": list(template.needs),
        "default_language": template.default_language,
        "languages": languages,
        "shell": list(template.shell),
        **({"user": user} if template.user != User() else {}),
        **({"sudo": True} if template.sudo else {}),
        "limits": limits,
        "env": dict(template.env),
        "network": template.network,
        "seccomp": template.seccomp,
        "ttl": template.ttl,
        "warm_context": template.warm_context,
        "warm_imports": list(template.warm_imports),
        **{key: value for key, value in begun.items() if value},
    }


# libyaml's parser, where PyYAML has it: every `capsule run` reads the templates, 9 ms faster.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_SafeLoader):  # type: ignore[misc, valid-type]  # one of two classes
    """Plain YAML, where a key that comes twice is an error instead of a silent replacement."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"key {key.value!r} comes twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made


def list_files(folder: Path | Traversable) -> Iterator[Path | Traversable]:
    try:
        names = sorted(folder.iterdir(), key=lambda file: file.name)
    except OSError as error:
        raise InvalidError(
            f"cannot read the templates in {folder}: {error.strerror}", field="templates_dir"
        ) from error
    return (file for file in names if file.name.endswith(SUFFIXES) and file.name[0] != ".")


def read_document(file: Path | Traversable) -> Document:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise InvalidError(f"template {file}: larger than {_MAX_FILE} bytes")
        content = yaml.load(data.decode("utf-8"), Loader)
    except OSError as error:
        if is_scarce(error):
            raise host_error(f"cannot read the template {file}", error) from error
        raise InvalidError(f"cannot read the template {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise InvalidError(f"the template {file} is not YAML: {detail}") from error
    if not isinstance(content, dict):
        raise InvalidError(f"the template {file} is not a mapping", hint="see python.yaml")
    return Document(file, content)


@dataclass(frozen=True, slots=True)
class Document:
    """One file and what is in it. Every complaint names the file, the field and the value."""

    file: Path | Traversable
    content: Mapping[Any, Any]

    def wrong(self, field: str, value: object, what: str, hint: str | None = None) -> NoReturn:
        text = f"template {self.file}: {field}: {brief(value)} {what}"
        raise InvalidError(text, hint=hint, field=field)

    @property
    def override(self) -> bool:
        return self._flag("override")

    def template(self) -> Template:
        known = [*(f.name for f in fields(Template)), "override"]
        self._keys(self.content, known, "")
        default = Template("")
        languages = self._languages()
        stem = re.sub(r"\.ya?ml$", "", self.file.name).lstrip(".")
        template = Template(
            name=self._text("name", stem, _NAME, "lower-case letters, digits, . _ and -"),
            description=self._string("description", default.description),
            root=self._text("root", default.root, _ROOT, "host, dir:/absolute/path or image:NAME"),
            image=self._optional("image", _IMAGE, "the name of an image"),
            runtime=self._optional("runtime", _RUNTIME, "the name of a runtime"),
            languages=languages,
            default_language=self._default_language(languages),
            needs=self._strings("needs", ()),
            shell=self._strings("shell", default.shell, least=1),
            user=self._user(default.user),
            sudo=self._flag("sudo"),
            limits=self._limits(default.limits),
            env=self._env(),
            network=self._choice("network", default.network, NETWORKS),
            seccomp=self._text("seccomp", default.seccomp, _PROFILE, "the name of a profile"),
            ttl=self._translated(check, "ttl", _TTL, self.content.get("ttl", default.ttl)),
            warm_context=self._choice("warm_context", default.warm_context, ("", *languages)),
            warm_imports=self._strings("warm_imports", default.warm_imports),
            prepare=self._string("prepare", default.prepare),
            start=self._string("start", default.start),
            ready=self._string("ready", default.ready),
        )
        _ = self.override  # checked wherever it stands
        return _with_sudo(template)

    def _languages(self) -> dict[str, Language]:
        found: dict[str, Language] = {}
        raw = self._mapping("languages", self.content.get("languages"))
        of_image = "image" in self.content or str(self.content.get("root")).startswith("image:")
        if not raw and not of_image:  # an image may have programs, and no interpreter
            self.wrong("languages", raw, "is empty", "name one, with its file and command")
        for name, value in raw.items():
            where = f"languages.{name}"
            entry = self._mapping(where, value)
            self._keys(entry, _LANGUAGE_KEYS, where)
            language = self._language(str(name), where, entry)
            for key in (str(name), *self._strings("aliases", (), entry, where)):
                if not _LANGUAGE_NAME.fullmatch(key):
                    self.wrong(where, key, "is not a name", "lower-case letters and digits")
                if key in found:
                    self.wrong(where, key, f"already means {found[key].name}")
                found[key] = language
        return found

    def _default_language(self, languages: Mapping[str, Language]) -> str:
        if not languages:
            return ""
        return self._choice("default_language", next(iter(languages)), languages)

    def _language(self, name: str, where: str, entry: Mapping[Any, Any]) -> Language:
        file = entry.get("file")
        if not isinstance(file, str) or "{id}" not in file or ".." in file.split("/"):
            hint = "a path with {id} in it, relative to /workspace, such as .capsule-{id}.py"
            self.wrong(f"{where}.file", file, "is not a file name", hint)
        command = self._strings("command", (), entry, where, least=1)
        if not any("{file}" in word for word in command):
            self.wrong(f"{where}.command", command, "does not mention {file}")
        carry = entry.get("carry")
        if carry is not None and carry not in CARRY_KINDS:
            self.wrong(f"{where}.carry", carry, f"is not one of {', '.join(CARRY_KINDS)}")
        return Language(name, file, command, carry)

    def _user(self, default: User) -> User:
        raw = self._mapping("user", self.content.get("user") or {})
        self._keys(raw, ("name", "home"), "user")
        name, home = raw.get("name", default.name), raw.get("home", default.home)
        if not isinstance(name, str) or not _USER.fullmatch(name):
            self.wrong("user.name", name, "is not a user's name", "lower-case letters and digits")
        if not isinstance(home, str) or not _HOME.fullmatch(home):
            self.wrong("user.home", home, "is not a home", "/workspace, or /home/NAME")
        return User(name, home)

    def _limits(self, default: Limits) -> Limits:
        raw = self._mapping("limits", self.content.get("limits") or {})
        return changed(
            default,
            **{str(k): self._translated(check_limit, str(k), v, _MOST) for k, v in raw.items()},
        )

    def _env(self) -> dict[str, str]:
        env = self._mapping("env", self.content.get("env") or {})
        for key, value in env.items():
            if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
                self.wrong("env", key, "is not the name of a variable")
            if not isinstance(value, str) or "\0" in value:
                self.wrong(f"env.{key}", value, "is not a text", 'put it in quotes, such as "1"')
        return dict(env)

    def _translated(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The complaints of settings.py do not know the file: add it."""
        try:
            return function(*arguments)
        except InvalidError as error:
            text = f"template {self.file}: {error.message}"
            raise InvalidError(text, hint=error.hint, **error.details) from None

    def _keys(
        self, mapping: Mapping[Any, Any], known: list[str] | tuple[str, ...], at: str
    ) -> None:
        for key in mapping:
            if key not in known:
                what = f"key in {at}" if at else "key"
                self._translated(_raise, unknown(str(key), known, what))

    def _mapping(self, field: str, value: object) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            self.wrong(field, value, "is not a mapping")
        return value

    def _flag(self, field: str) -> bool:
        value = self.content.get(field, False)
        if not isinstance(value, bool):
            self.wrong(field, value, "is not true or false")
        return value

    def _string(self, field: str, default: str) -> str:
        value = self.content.get(field, default)
        if not isinstance(value, str):
            self.wrong(field, value, "is not a text")
        return value

    def _text(self, field: str, default: str, pattern: re.Pattern[str], allowed: str) -> str:
        value = self._string(field, default)
        if not pattern.fullmatch(value):
            self.wrong(field, value, f"is not {allowed}")
        return value

    def _optional(self, field: str, pattern: re.Pattern[str], allowed: str) -> str:
        return self._text(field, "", pattern, allowed) if field in self.content else ""

    def _choice(self, field: str, default: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
        value = self._string(field, default)
        if value not in known:
            self.wrong(field, value, f"is not one of {', '.join(known)}")
        return value

    def _strings(
        self,
        field: str,
        default: tuple[str, ...],
        entry: Mapping[Any, Any] | None = None,
        where: str = "",
        *,
        least: int = 0,
    ) -> tuple[str, ...]:
        value = (self.content if entry is None else entry).get(field, list(default))
        path = f"{where}.{field}" if where else field
        if not isinstance(value, list) or not all(isinstance(x, str) and x for x in value):
            self.wrong(path, value, "is not a list of texts", "put numbers in quotes")
        if len(value) < least:
            self.wrong(path, value, "is empty")
        return tuple(value)


def _with_sudo(template: Template) -> Template:
    """With our `sudo` in front of its path: the host's own has no use in a sandbox. An image has
    ours among its programs."""
    path = template.env.get("PATH", SYSTEM_PATH)
    if not template.sudo or template.root != "host" or SUDO_FOLDER in path.split(":"):
        return template
    return changed(template, env={**template.env, "PATH": f"{SUDO_FOLDER}:{path}"})


def _raise(error: InvalidError) -> NoReturn:
    raise error
