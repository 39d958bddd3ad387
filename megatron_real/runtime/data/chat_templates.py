"""Conversations as text: Jinja templates, in the form that Hugging Face tokenizers carry.

A template sees ``messages``, ``add_generation_prompt`` (always true: the text ends where the answer begins) and
``raise_exception(text)``, by which it refuses a conversation. Blocks take their line's indentation and line feed with
them. Source of these conventions: "Chat templates" in the documentation of transformers.

Templates run in Jinja's sandbox: they come from strangers' repositories.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_real.errors import ConfigError

__all__ = ["Message", "load_template", "render"]

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``; what else it has is the template's business."""


def load_template(option: str) -> str:
    """The text of a template.

    Args:
        option: the text itself, or the path of its file.

    Raises:
        ConfigError: it is neither, or no Jinja.
    """
    text = option
    if "{{" not in option and "{%" not in option:
        try:
            text = Path(option).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat template: found {option!r}, which is no Jinja text and no file that can be read ({error}). Give "
                "the path of a file, or the text, such as '{{ messages[0].content }}'."
            ) from error
    try:
        _compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"chat template: line {error.lineno} is no Jinja ({error.message}). Mend the template {option[:60]!r}."
        ) from error
    return text


def render(template: str, messages: Sequence[Message]) -> str:
    """The conversation as text, up to where the next answer begins.

    Raises:
        jinja2.TemplateError: the template is wrong, or refuses this conversation.
    """
    return _compiled(template).render(messages=messages, add_generation_prompt=True)


class _Unknown(jinja2.Undefined):
    """What a template does not know: it may ask ``if tools``, but not write it out."""

    __str__ = jinja2.Undefined._fail_with_undefined_error  # as Jinja's documentation makes such classes


@functools.cache
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=_Unknown, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(text)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
