"""Bytes of a log as lines: any encoding, carriage returns, colour codes, lines without end."""

from __future__ import annotations

import codecs
import re

LONGEST = 2**14  # characters; what is longer is cut into several lines
_ENDS = re.compile(r"[\r\n]+")
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class Lines:
    r"""Cuts blocks of bytes into lines; an unfinished line waits for the next block.

    >>> lines = Lines()
    >>> lines.feed(b"10%|#  | 1/10\r\x1b[32mstep: 1\x1b[0m\nste"), lines.end()
    (['10%|#  | 1/10', 'step: 1'], ['ste'])
    """

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""

    def feed(self, block: bytes) -> list[str]:
        """The lines that this block ends."""
        if self._decoder is None:
            name = _MARKS.get(block[:2], "utf-8-sig")  # PowerShell writes UTF-16
            block = block[2:] if block[:2] in _MARKS else block
            self._decoder = codecs.getincrementaldecoder(name)("replace")
        *whole, self._rest = _ENDS.split(self._rest + self._text(self._decoder.decode(block)))
        if len(self._rest) > LONGEST:
            whole.append(self._rest)
            self._rest = ""
        if whole and len(max(whole, key=len)) > LONGEST:
            whole = [piece for line in whole for piece in _pieces(line)]
        return whole

    def end(self) -> list[str]:
        """The last line, if the log does not end in a line end."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []

    @staticmethod
    def _text(text: str) -> str:
        text = text.replace("\0", "")  # of a log that was cut while it was written, or UTF-16
        return _CODES.sub("", text) if "\x1b" in text else text


def _pieces(line: str) -> list[str]:
    return [line[i : i + LONGEST] for i in range(0, len(line), LONGEST)] or [line]
