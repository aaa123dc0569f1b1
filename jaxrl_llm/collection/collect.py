"""A file of data from a model's own answers: problem after problem, going on where an earlier attempt stopped."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.collection.counts import Counts
from jaxrl_llm.collection.ledger import Entry, Ledger, opened
from jaxrl_llm.collection.sampling import Answerer, Asked, ask
from jaxrl_llm.models.fingerprint import digest, weights_digest
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.tasks import fingerprint as fingerprint_of_problems


def collect(
    by: Answerer,
    asked: Asked,
    path: Path,
    peers: Peers = ALONE,
    status: Callable[[str], None] = lambda text: None,
) -> Counts:
    """Write the rows of all problems, in their order, as JSON lines; returns what became of all of them.

    Until the last problem is done they stand in ``PATH.part``, and the same call goes on from there, whatever ended the
    one before: the file is then the same, byte for byte. Problems that are asked together stay together for that, so
    that at most so many are asked again. Of several processes all sample and the first writes.

    Raises:
      InputError: the file is there, or was begun with other settings; nothing has been sampled then.
    """
    settings = settings_of(by, asked)
    total = len(asked.problems)
    with contextlib.ExitStack() as stack:
        book: list[Ledger] = []

        def begin() -> tuple[int, dict[str, Any]]:
            book.append(stack.enter_context(opened(path, settings)))
            return book[0].done, dataclasses.asdict(book[0].counts)

        done, found = peers.first(begin)
        counts = Counts(**found)
        size = asked.at_once(by.engine.slots)
        for first in range(done // size * size, total, size):
            progress = f"collecting {first}/{total} problems, {counts.rows} rows: "
            began = time.perf_counter()
            entries = ask(by, asked, first, lambda text, progress=progress: status(progress + text))
            new = timed(entries[max(done - first, 0) :], time.perf_counter() - began)
            for ledger in book:
                ledger.add(new)
            counts = sum((entry.counts for entry in new), counts)
        by.engine.start(asked.sampling(()))  # nothing runs any more: what comes next needs the memory of the cache
        peers.first(lambda: [ledger.finish() for ledger in book])
    return counts


def timed(entries: Sequence[Entry], seconds: float) -> list[Entry]:
    """The entries, each with its share of the seconds that all of them took."""
    share = Counts(seconds=seconds / max(len(entries), 1))
    return [dataclasses.replace(entry, counts=entry.counts + share) for entry in entries]


def settings_of(by: Answerer, asked: Asked) -> dict[str, Any]:
    """All that decides the rows, as JSON values; weights, problems and prompts by their fingerprints."""
    data = asked.data
    settings = {
        "weights": weights_digest(by.model),
        "problems": fingerprint_of_problems(asked.problems)["order"],
        "checked": sorted({f"{problem.verifier} of {problem.extractor}" for problem in asked.problems}),
        "prompts": digest([asked.prompts[problem] for problem in asked.problems]),
        "kind": asked.kind,
        "samples": data.samples,
        "temperature": data.temperature,
        "top_p": data.top_p,
        "max_new_tokens": asked.max_new_tokens,
        "seed": asked.seed,
    }
    if asked.kind == "steps":
        return settings | {"continuations": data.continuations, "separator": asked.separator}
    if asked.kind == "pairs":
        settings |= {"match_length": data.match_length, "cut_off": data.cut_off}
    return settings | {"keep": data.keep}
