"""The start-up probe: does what answers at an engine's URL give exact ids, log-probabilities and weight versions?

A router in between that strips one of them would make every call untrainable, found out hours later.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence

import aiohttp

from gyre_agent_proxy.client import EngineClient
from gyre_agent_proxy.conversation import Sampling
from gyre_agent_proxy.errors import EngineRefused, UnfitEngine
from gyre_agent_proxy.stream import Reader, StreamError, Versions

log = logging.getLogger(__name__)

_TOKENS = 4


async def probe(client: EngineClient, url: str, prompt: Sequence[int], deadline: float) -> None:
    """Sample a few tokens at `url`. Raises `UnfitEngine`.

    An engine that is not up, or does not answer within `deadline` seconds, is only logged: it may come later.
    """
    reader, ids, logprobs = Reader(), 0, True
    rid = f"gyre-probe-{uuid.uuid4().hex}"
    versions: Versions = ()
    sampling = Sampling(max_tokens=_TOKENS)
    try:
        async with asyncio.timeout(deadline):
            async for event in client.generate(url, rid, list(prompt), sampling, _TOKENS, interval=1, fresh=True):
                piece = reader.read(event)
                ids += len(piece.ids)
                logprobs = logprobs and piece.logprobs is not None
                versions = piece.versions or versions
    except (StreamError, EngineRefused) as e:
        raise UnfitEngine(
            f"{url}: {e}; the proxy needs SGLang's /generate, with nothing in between that edits it"
        ) from e
    except (aiohttp.ClientError, OSError, TimeoutError) as e:
        log.warning("%s does not answer yet (%s: %s); calls wait for it", url, type(e).__name__, e)
        return
    if not ids:
        raise UnfitEngine(f"{url}: answered a prompt without a token; is it an SGLang engine?")
    if not logprobs:
        raise UnfitEngine(
            f"{url}: gave {ids} tokens without their log-probabilities, so nothing could be trained on; "
            "does a router in between strip `output_token_logprobs`?"
        )
    if not versions:
        log.warning("%s does not say which weights sampled its tokens (no `weight_version`)", url)
