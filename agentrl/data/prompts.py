"""Prompt data: rows of a JSONL or Parquet file as checked `PromptRow` records.

1. The prompt under `input_key` is non-empty text or a list of chat messages; the last message is not the assistant's.
   For `sft_turns` it is a whole conversation that ends with the assistant.
2. Images are parts of messages, or a list under `image_key`; the row's messages hold references to them.
3. Label, metadata and tools are optional. The file is indexed, not loaded. A bad row raises `DataError`."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.chat.demonstration import learned
from agentrl.chat.messages import normalise_tools
from agentrl.data.settings import DataSettings
from agentrl.errors import DataError, MediaError, TemplateError, raised_as
from agentrl.media import Image, is_image, take_images
from agentrl.rowfiles import json_type, open_rows, read_json, split_slice
from agentrl.sample import RECORDED, Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that messages of a prompt may have. Many chat templates silently leave out messages of other roles."""

_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns under which data sets keep images, videos and sound."""

_IMAGE_MARK = "<image>"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt."""

    index: int  # the row's number within the (sliced) data, from 0
    prompt: str | list[Message]  # text, or chat messages
    label: Any = None  # the row's value under the label key; None if there is none
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None  # the row's own schemas; None leaves the choice to the environment
    env: str | None = None  # the name of the row's environment, if the run has several
    has_unread_label: bool = False  # the row has a field `label`, and no setting names the label's field
    images: Mapping[str, Image] = field(default_factory=dict)  # the prompt's images, by hash


Look = Callable[[PromptRow], str | None]  # returns what is wrong with a row; None if the row is good


class PromptData:
    """Rows of one file (`file.jsonl`, `file.parquet`, either with `@[start:end]`), by number. The settings give the
    fields of a row's parts and the number of rows, and decide if a text prompt becomes a user message. Raises
    DataError: the file or the slice has no rows, or cannot be read."""

    def __init__(self, path: str, settings: DataSettings | None = None) -> None:
        plain, part = split_slice(path)
        self.path = path
        self._file, self._settings = open_rows(plain), settings or DataSettings()
        if not (rows := range(len(self._file))[part]):
            raise DataError(f"{path}: the slice is empty; {plain} has {len(self._file)} rows")
        self._rows, self._drawn = rows[: self._settings.prompt_data_limit], 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return map(self.__getitem__, range(len(self)))

    def where(self, index: int) -> str:
        """Return the file and line of row `index`, for messages."""
        return self._file.where(self._rows[index])

    @cached_property
    def digest(self) -> str:
        """A hash of up to 16 rows, spread evenly: a sign of other rows, or of another order."""
        some = [self._file.read(at) for at in self._rows[:: -(-len(self) // 16)]]
        return hashlib.blake2b(repr(some).encode(errors="replace"), digest_size=8).hexdigest()

    def check(self, look: Look = lambda row: None) -> None:
        """Read every row once. Raises DataError: a row is malformed, or `look` returns a problem."""
        for row in self:
            if problem := look(row):
                raise DataError(f"{self.where(row.index)}: {problem}")

    def check_named(self) -> None:
        """Raise DataError if no row has a field that a setting names. Fields with a default name may be missing."""
        for name in ("metadata_key", "tool_key", "image_key"):
            key, usual = getattr(self._settings, name), DataSettings.model_fields[name].default
            if key != usual and not any(key in self._file.read(at) for at in self._rows):
                has = _names(self._file.read(self._rows[0]))
                remedy = f"the first has {has}; correct the key, or leave it out"
                raise DataError(f"{self.path}: no row has a field {key!r}; {remedy}")

    def __getitem__(self, index: int) -> PromptRow:
        """Return row `index`, from 0. Raises IndexError: there is no such row. DataError: the row is malformed."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is outside the {len(self)} rows of the prompt data")
        row, where, used = self._file.read(self._rows[index]), self.where(index), self._settings
        if media := next((key for key in _MEDIA if key != used.image_key and row.get(key)), None):
            hint = f"set --image-key {media}" if media.startswith("image") else "videos and sound are not read"
            raise DataError(f"{where}: field {media!r} is not shown to the model; {hint}, or leave the field out")
        prompt, images = self._with_images(self._prompt(row, where), row, where)
        plain = {**row, used.input_key: prompt}  # without the bytes of images
        for key in row.keys() & {used.input_key, used.label_key, used.metadata_key, used.tool_key}:
            remedy = "use finite numbers, text, lists, objects"
            with raised_as(DataError, f"{where}: field {key!r}", TypeError, ValueError, remedy=remedy):
                json.dumps(plain[key], allow_nan=False)
        unread = used.label_key is None and row.get("label") is not None
        label, metadata, tools = self._label(row, where), self._metadata(row, where), self._tools(row, where)
        env = None if (own := used.env_key) is None else row.get(own)
        if env is not None and not isinstance(env, str):
            raise DataError(f"{where}: field {own!r} must be the name of an environment, got {json_type(env)}")
        return PromptRow(index, prompt, label, metadata, tools, env, unread, images)

    def _prompt(self, row: dict[str, Any], where: str) -> str | list[Message]:
        if (key := self._settings.input_key) not in row:
            raise DataError(f"{where}: no field {key!r} for the prompt; it has {_names(row)}; set --input-key")
        if isinstance(prompt := row[key], str) and self._settings.sft_turns is None:
            if not prompt.strip():
                raise DataError(f"{where}: field {key!r} is an empty text; expected a prompt, or set --input-key")
            return [{"role": "user", "content": prompt}] if self._settings.apply_chat_template else prompt
        if not isinstance(prompt, list):
            wanted = f"{'a string or ' if self._settings.sft_turns is None else ''}a list of chat messages"
            raise DataError(f"{where}: field {key!r} must be {wanted}, got {json_type(prompt)}")
        if not prompt:
            raise DataError(f"{where}: field {key!r} is an empty list; expected at least one chat message")
        for number, message in enumerate(prompt):
            if problem := _problem(message):
                raise DataError(f"{where}: field {key!r} message {number} must {problem}, got {message!r:.120}")
        self._end(prompt, f"{where}: field {key!r}")
        return prompt

    def _with_images(
        self, prompt: str | list[Message], row: dict[str, Any], where: str
    ) -> tuple[str | list[Message], dict[str, Image]]:
        """Return the prompt with references in place of images, and the images."""
        given = row.get(key) if (key := self._settings.image_key) is not None else None
        with raised_as(DataError, where, MediaError):
            if given is not None:
                prompt = _placed(prompt, given if isinstance(given, list) else [given])
            return (prompt, {}) if isinstance(prompt, str) else take_images(prompt, {}, self._settings.image_limits)

    def _end(self, messages: list[Message], where: str) -> None:
        """Check the last message's role: the assistant's for SFT, else another role."""
        if (turns := self._settings.sft_turns) is not None:
            with raised_as(DataError, where, TemplateError):
                learned(messages, turns)
        elif messages[-1]["role"] == "assistant":
            remedy = "leave it out, or learn from whole conversations with `agentrl sft`"
            raise DataError(f"{where}: the last message is the assistant's; {remedy}")

    def _label(self, row: dict[str, Any], where: str) -> Any:
        if (key := self._settings.label_key) is None:
            return None
        if key not in row:
            raise DataError(f"{where}: no field {key!r} for the label; it has {_names(row)}; set --label-key")
        return row[key]

    def _metadata(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        metadata: dict[str, Any] = _typed(row, key := self._settings.metadata_key, dict, where) or {}
        if taken := sorted(RECORDED & metadata.keys()):
            taken_by = "under which agentrl writes its own records; rename it"
            raise DataError(f"{where}: field {key!r} has the key {taken[0]!r}, {taken_by}")
        return metadata

    def _tools(self, row: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
        tools: list[Any] | None = _typed(row, key := self._settings.tool_key, list, where)
        with raised_as(DataError, f"{where}: field {key!r}", TemplateError):
            normalise_tools(tools)
        return tools

    def sample(self, num_samples: int) -> list[str | list[Message]]:
        """Return the next prompts, in order and repeated. For user sources that have a dataset and keep no position."""
        first, self._drawn = self._drawn, self._drawn + num_samples
        return [copy.deepcopy(self[i % len(self)].prompt) for i in range(first, self._drawn)]


def open_prompts(settings: DataSettings, look: Look = lambda row: None) -> PromptData | None:
    """Return the prompt data that the settings name, checked by `prompt_data_check`; None if they name none."""
    if settings.prompt_data is None:
        return None
    data = PromptData(settings.prompt_data, settings)
    if settings.prompt_data_check == "full":
        data.check(look)
        data.check_named()
    return data


def _problem(message: Any) -> str | None:
    """Describe the first reason why `message` is not a chat message; None if it is a chat message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "be an object with a string 'role'"
    if message["role"] not in ROLES:
        known = _SHAREGPT.get(message["role"])
        hint = f"; ShareGPT's {message['role']!r} is {known!r}" if known else ""
        return f"have one of the roles {', '.join(ROLES)}{hint}"
    if isinstance(content := message.get("content"), str) or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, list) or not all(isinstance(part, (str, dict)) for part in content):
        return "have 'content', a text or a list of parts"
    shown = all(isinstance(part, str) or isinstance(part.get("text"), str) or is_image(part) for part in content)
    return None if shown else "have parts of text and images only (videos and sound are not shown to the model)"


def _placed(prompt: str | list[Message], images: list[Any]) -> list[Message]:
    """Return the prompt's messages with image parts at the marks, or before the last user message's text. Raises
    MediaError: the number of marks is neither 0 nor the number of images."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    parts: list[Message] = [{"type": "image", "image": image} for image in images]
    marks = sum(text.count(_IMAGE_MARK) for m in messages if isinstance(text := m.get("content"), str))
    last = max((at for at, m in enumerate(messages) if m["role"] == "user"), default=None)
    if marks not in (0, len(parts)) or last is None:
        raise MediaError(f"the prompt has {marks} marks {_IMAGE_MARK} for {len(parts)} images; use one each, or none")
    if not marks:
        text = messages[last].get("content") or ""
        behind = [{"type": "text", "text": text}] if isinstance(text, str) else text
        messages[last] = {**messages[last], "content": [*parts, *behind]}
        return messages
    rest = iter(parts)
    for at, message in enumerate(messages):
        if isinstance(text := message.get("content"), str) and _IMAGE_MARK in text:
            first, *others = text.split(_IMAGE_MARK)
            content: list[Message] = [{"type": "text", "text": first}]
            for piece in others:
                content += [next(rest), {"type": "text", "text": piece}]
            messages[at] = {**message, "content": [part for part in content if part.get("text") != ""]}
    return messages


def _typed(row: dict[str, Any], key: str, kind: type, where: str) -> Any:
    """Return the optional field `key`, decoded if it is JSON text; None if it is absent."""
    if isinstance(value := row.get(key), str):
        with raised_as(DataError, f"{where}: field {key!r} is text but not JSON", ValueError):
            value = read_json(value)
    if value is not None and not isinstance(value, kind):
        want = "an object" if kind is dict else "a list"
        raise DataError(f"{where}: field {key!r} must be {want}, got {json_type(value)}")
    return value


def _names(row: dict[str, Any]) -> str:
    return "the fields " + ", ".join(map(repr, sorted(row))) if row else "no fields at all"
