"""The page that shows a server to a person. It holds nothing of the model, so it needs no key."""

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

routes = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parents[1] / "page"
_FILES = {file.name: file for file in _FOLDER.iterdir() if file.is_file()}
_HEADERS = {
    # Nothing from elsewhere, and nothing that a name could smuggle in, is ever run.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@routes.get("/")
@routes.get("/page/{name}")
async def page(request: Request, name: str = "index.html") -> Response:
    """One of the page's files."""
    file = _FILES.get(name)
    if file is None:
        return Response(status_code=404)
    answer = FileResponse(file, headers=_HEADERS, stat_result=file.stat())
    if request.headers.get("if-none-match") == answer.headers["etag"]:
        return Response(status_code=304, headers={**_HEADERS, "ETag": answer.headers["etag"]})
    return answer
