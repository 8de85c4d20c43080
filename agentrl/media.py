"""Images of a trajectory: checked files, references to them in messages, and their positions among token ids.

1. An `Image` has the unchanged file and its hash. Equal files are one image.
2. In messages of the normal form an image is a reference: a part with hash, width and height. Messages stay JSON.
3. `take_images` replaces the image parts of OpenAI's, Anthropic's and Hugging Face's form by references."""

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from agentrl.errors import MediaError, raised_as

Message = dict[str, Any]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # image formats that are read, as Pillow names them

_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on images of one trajectory."""

    pixels: int = 4096 * 4096  # maximum of width times height of an image
    file_bytes: int = 20 << 20  # maximum size of an image's file in bytes
    count: int = 64  # maximum number of images of a trajectory
    root: str | None = None  # folder that contains all image paths; None: paths are refused


USUAL = ImageLimits()
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")  # modes of Pillow images that a PNG can have
UNLIMITED = ImageLimits(sys.maxsize, sys.maxsize, sys.maxsize)  # for images that a run has checked


@dataclass(frozen=True, slots=True)
class Image:
    """An image's file."""

    hash: str  # the SHA-256 of `data` in hexadecimal digits
    data: bytes  # the file's bytes
    width: int  # in pixels
    height: int  # in pixels
    form: str  # the format, one of `FORMATS`

    @classmethod
    def from_bytes(cls, data: bytes, limits: ImageLimits = USUAL) -> Self:
        """Check a file's bytes and decode them once. Raises MediaError: the file is too large, has too many pixels, is
        damaged, or has another format."""
        import PIL.Image

        if len(data) > limits.file_bytes:
            raise MediaError(f"an image has {len(data):,} bytes, at most {limits.file_bytes:,} are allowed")
        try:
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                (width, height), form = picture.size, "JPEG" if picture.format == "MPO" else str(picture.format)
                if width * height > limits.pixels:
                    raise MediaError(f"an image has {width} x {height} pixels, at most {limits.pixels:,} are allowed")
                picture.load()
        except MediaError:
            raise
        except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
            raise MediaError(f"an image has too many pixels, at most {limits.pixels:,} are allowed: {error}") from error
        except PIL.UnidentifiedImageError as error:
            raise MediaError(f"an image is none of {', '.join(FORMATS)}: it begins with {data[:8]!r}") from error
        except Exception as error:  # Pillow raises errors of many kinds for damaged files
            raise MediaError(f"an image's file is damaged: {error}") from error
        return cls(hashlib.sha256(data).hexdigest(), data, width, height, form)

    @property
    def url(self) -> str:
        """The data URL."""
        return f"data:image/{self.form.lower()};base64,{base64.b64encode(self.data).decode()}"

    @property
    def reference(self) -> dict[str, Any]:
        """The part that stands for the image in messages of the normal form."""
        return {"type": "image", "image": _PREFIX + self.hash, "width": self.width, "height": self.height}


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The position of an image in `Sample.tokens`: its placeholder ids from `start` to `end` (exclusive)."""

    hash: str
    start: int
    end: int

    def moved(self, by: int) -> Self:
        """Return the span, moved by `by` ids."""
        return replace(self, start=self.start + by, end=self.end + by)


def image_from_url(url: str, limits: ImageLimits = USUAL) -> Image:
    """Read an image from a data URL. Raises MediaError: the URL has no image within the limits."""
    return Image.from_bytes(_from_text(url, limits), limits)


def reference_hash(part: Any) -> str | None:
    """Return the image's hash if `part` is a reference of the normal form; None otherwise."""
    name = part.get("image") if isinstance(part, Mapping) and part.get("type") == "image" else None
    return name[len(_PREFIX) :] if isinstance(name, str) and name.startswith(_PREFIX) else None


def references(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the references in messages of the normal form, in order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part for part in content if reference_hash(part) is not None)


def is_image(part: Any) -> bool:
    """Return true if a part of a message's content is an image, in any form."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def is_picture(value: Any) -> bool:
    """Return true if `value` is an `Image` or an image of Pillow."""
    return isinstance(value, Image) or (hasattr(value, "tobytes") and hasattr(value, "getbands"))


def has_images(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return true if the content of a message has an image, in any form."""
    contents = [message.get("content") for message in messages]
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)


def take_images(
    messages: Sequence[Mapping[str, Any]], known: Mapping[str, Image], limits: ImageLimits = USUAL
) -> tuple[list[Message], dict[str, Image]]:
    """Replace images by references. An image part is OpenAI's `image_url` or `input_image`, Anthropic's `image` with a
    `source`, or Hugging Face's `image` with a data URL, a path, bytes, a Pillow image or an `Image`. `known`: the
    trajectory's earlier images, by hash. Returns the messages, and their images that `known` lacks, by hash. Raises
    MediaError: an image is refused. The error names the message and the part."""
    taken, out = dict[str, Image](), list[Message]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_image, content)):
            out.append(dict(message))
            continue
        parts = []
        for place, part in enumerate(content):
            if is_image(part):
                with raised_as(MediaError, f"message {number}, part {place}", MediaError):
                    part = _take(part, known, taken, limits)
            parts.append(part)
        out.append({**message, "content": parts})
    if len(known) + len(taken) > limits.count:
        raise MediaError(f"the trajectory has {len(known) + len(taken)} images, at most {limits.count} are allowed")
    return out, taken


def _take(part: Mapping[str, Any], known: Mapping[str, Image], taken: dict[str, Image], limits: ImageLimits) -> Message:
    """Return the reference of one image part; add its image to `taken` if it is new."""
    if (name := reference_hash(part)) is not None:
        if (old := known.get(name) or taken.get(name)) is None:
            raise MediaError(f"no image of the trajectory has the hash {name}; give the image itself")
        return old.reference
    if isinstance(given := part.get("image"), Image):
        return (known.get(given.hash) or taken.setdefault(given.hash, given)).reference
    name = hashlib.sha256(data := _file_bytes(part, limits)).hexdigest()
    if (old := known.get(name) or taken.get(name)) is None:  # an image that is known is not decoded again
        old = taken[name] = Image.from_bytes(data, limits)
    return old.reference


def _file_bytes(part: Mapping[str, Any], limits: ImageLimits) -> bytes:
    """Return the bytes of an image part's file. The part may have any form."""
    kind = part["type"]
    given = part.get("image_url" if kind in ("image_url", "input_image") else "image")
    if isinstance(given, Mapping):  # OpenAI's form, or a column of the `datasets` library
        given = next((given[key] for key in ("url", "bytes", "path") if given.get(key) is not None), None)
    if kind == "image" and isinstance(source := part.get("source"), Mapping):
        if source.get("type") != "base64":
            raise MediaError(f"an image's source has the type {source.get('type')!r}; only base64 is read")
        return _decoded(str(source.get("data")), limits)
    if isinstance(given, (bytes, bytearray)):
        return bytes(given)
    if isinstance(given, (str, Path)):
        return _from_text(str(given), limits)
    if given is not None and is_picture(given):
        plain = given if given.mode in _MODES else given.convert("RGB")
        plain.save(stream := io.BytesIO(), "PNG")
        return stream.getvalue()
    expected = "expected a data URL, a path, bytes or an image"
    raise MediaError(f"an image part of type {kind!r} holds {type(given).__name__}; {expected}")


def _from_text(text: str, limits: ImageLimits) -> bytes:
    """Return the bytes of the file that a data URL or a path below the root gives."""
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise MediaError("an image's data URL must have the form data:image/png;base64,...")
        return _decoded(body, limits)
    if "://" in text[:16]:
        raise MediaError(f"an image is behind the URL {text!r:.80}; images are not fetched, give a data URL or a path")
    if limits.root is None:
        raise MediaError(f"an image is the path {text!r:.80}; name the folder of images with --image-root")
    file = ((root := Path(limits.root).resolve()) / text).resolve()
    if not file.is_relative_to(root):
        raise MediaError(f"the image path {text!r:.80} leads out of --image-root {root}")
    with raised_as(MediaError, str(file), OSError, shown=": {.strerror}"):
        if (size := file.stat().st_size) > limits.file_bytes:
            raise MediaError(f"{file} has {size:,} bytes, at most {limits.file_bytes:,} are allowed")
        return file.read_bytes()


def _decoded(body: str, limits: ImageLimits) -> bytes:
    """Return the bytes of a base64 text."""
    if len(body) > limits.file_bytes // 3 * 4 + 8:
        raise MediaError(f"an image has about {len(body) // 4 * 3:,} bytes, at most {limits.file_bytes:,} are allowed")
    with raised_as(MediaError, "an image's base64 text is damaged", binascii.Error, ValueError):
        return base64.b64decode(body, validate=True)
