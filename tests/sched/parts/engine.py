"""The control API of an SGLang engine without a model, for faults that a real one cannot be made to have.

Started as `engine.py PORT FAULTS`; FAULTS is a file with one fault a line, read at every request and at the start:
    dies            ends with exit code 3 at the start
    never_healthy   /health stays 503
    busy            /flush_cache is refused, as if a request were running
    update_fails    /update_weights_from_disk and …_from_tensor answer 400
    update_dies     the process ends in the middle of an update
    wrong_version   the new version is not taken over
    samples_with_old  the new version is taken over, and not used
    wrong_weights   /weights_checker gives another checksum than the loaded weights have
    hangs           /health never answers
GET /calls lists the paths called so far. Releasing twice, or resuming what is not released, ends the process, as in
SGLang.
"""

import asyncio
import hashlib
import os
import sys
from pathlib import Path

from aiohttp import web

PORT, FAULTS = int(sys.argv[1]), Path(sys.argv[2])


def faults() -> set[str]:
    return set(FAULTS.read_text().split()) if FAULTS.exists() else set()


class Engine:
    def __init__(self) -> None:
        self.version = "0"
        self.released = False
        self.paused = ""
        self.updating = False
        self.checksum = ""
        self.calls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        path, now = request.path, faults()
        if path == "/calls":
            return web.json_response(self.calls)
        if path != "/health":
            self.calls.append(path)
        match path:
            case "/health":
                if "hangs" in now:
                    await asyncio.sleep(3600)
                return web.Response(status=503 if "never_healthy" in now else 200)
            case "/generate" if "seconds" in body:  # a request of a stand-in for a proxy
                end = asyncio.get_running_loop().time() + body["seconds"]
                while asyncio.get_running_loop().time() < end:
                    if self.released:
                        return web.Response(status=500, text="a request reached an engine without memory")
                    await asyncio.sleep(0.005)
                return web.json_response({"output_ids": [1, 2]})
            case "/generate":
                sampled = "0" if "samples_with_old" in now else self.version
                meta = {"weight_version": sampled, "finish_reason": {"type": "length"}}
                return web.json_response({"output_ids": [1, 2], "meta_info": meta})
            case "/pause_generation":
                self.paused = body["mode"]
            case "/model_info":
                return web.json_response({"weight_version": self.version})
            case "/flush_cache":
                return web.Response(status=400 if "busy" in now else 200)
            case "/release_memory_occupation" | "/resume_memory_occupation":
                release = path.startswith("/release")
                if release == self.released:
                    os._exit(4)
                self.released = release
            case "/weights_checker":
                checksum = "0" * 16 if "wrong_weights" in now else self.checksum
                return web.json_response({"ranks": [{"checksums": {"w": checksum}}]})
            case "/begin_weight_update" | "/end_weight_update":
                if (path == "/begin_weight_update") == self.updating:
                    return web.Response(status=400)
                self.updating = not self.updating
            case "/update_weights_from_tensor":
                assert self.updating
                assert body["serialized_named_tensors"]
                self.checksum = ""
                return self.update(body, now)
            case "/update_weights_from_disk":
                data = (Path(body["model_path"]) / "model.safetensors").read_bytes()
                weights = data[8 + int.from_bytes(data[:8], "little") :]
                self.checksum = hashlib.sha256(weights).hexdigest()[:16]
                return self.update(body, now)
        return web.Response()

    def update(self, body: dict, now: set[str]) -> web.Response:
        if body["weight_version"] is not None:
            assert body["flush_cache"] == (self.paused == "retract")
        assert not body["abort_all_requests"]
        if "update_dies" in now:
            os._exit(5)
        if "update_fails" in now:
            return web.json_response({"success": False, "message": "a scripted failure"}, status=400)
        if "wrong_version" not in now:
            self.version = body["weight_version"] or self.version
        return web.Response()


def main() -> None:
    if "dies" in faults():
        print("the model does not fit")
        sys.exit(3)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Engine().answer)
    web.run_app(app, host="127.0.0.1", port=PORT, print=None, handle_signals=True)


if __name__ == "__main__":
    main()
