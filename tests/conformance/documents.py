"""Code in README.md and docs/*.md, run by the folder whose framework it names.

A block opened with "python" needs no framework, one opened with "python torch" needs torch.
Blocks with `>>>` must print what they say. A comment `<!-- setup torch ... -->` on a page holds
what its blocks for torch take for granted: a model, a batch.
"""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def snippets(language):
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)
        framework = language.partition(" ")[2] or "python"
        setup = "".join(re.findall(rf"^<!-- setup {framework}\n(.*?)^-->", text, re.S | re.M))
        for i, code in enumerate(blocks):
            yield pytest.param(page, setup + code, id=f"{page.name}-{i}")


def run(page, code):
    if ">>>" in code:
        test = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test)
        assert runner.failures == 0
    else:
        exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
