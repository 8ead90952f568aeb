"""Access control: only a browser on this machine that opened the printed address may ask, and only from this page.

Every request must name the loopback interface in `Host` (a page elsewhere that resolves its own name to 127.0.0.1 does
not), on any port, since a tunnel may have another one than the server. It must come from the origin that it names if it
has an `Origin`, and carry the token of the printed address: as a cookie, which opening the address sets, or as
`Authorization: Bearer`. Responses allow no script, style or request but this server's.
"""

import hmac
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}  # fmt: skip
LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
"""A `Host` of this machine or of the end of a tunnel to it."""


class Guard:
    """ASGI middleware that passes only requests that meet the conditions of this module's docstring."""

    def __init__(self, app: ASGIApp, *, token: str, port: int, once: str = "") -> None:
        """once: another token, which opens the page a single time: others on this machine can read the command line of
        the browser that is started with it."""
        self._app = app
        self._token = token
        self._once = once
        self._cookie = f"mopd_view_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or 401, set the cookie, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, headed)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not LOCAL_HOST.fullmatch(host):
            return PlainTextResponse("this server answers only under a name of this machine, such as localhost", 403)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("requests of other pages are refused", 403)
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("requests of other pages are refused", 403)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and scope["method"] == "GET" and token:
            if not hmac.compare_digest(token.encode(), self._token.encode()) and not self._opens_once(token):
                return PlainTextResponse("this address has expired; open the one that `mopd view` printed", 401)
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if hmac.compare_digest(self._shown(headers).encode(), self._token.encode()):
            return None
        text = "open the address that `mopd view` printed: it carries a token"
        return JSONResponse({"error": text}, 401) if scope["path"].startswith("/api/") else PlainTextResponse(text, 401)

    def _opens_once(self, token: str) -> bool:
        if not self._once or not hmac.compare_digest(token.encode(), self._once.encode()):
            return False
        self._once = ""
        return True

    def _shown(self, headers: Headers) -> str:
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return value.strip()
        try:
            cookie: SimpleCookie = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return ""
        return cookie[self._cookie].value if self._cookie in cookie else ""
