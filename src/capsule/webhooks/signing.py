"""How a receiver knows that a delivery is ours, and not an old one sent again.

    Capsule-Signature: t=1763230000,v1=HEX

HEX is HMAC-SHA256, with the webhook's secret, of the time, a dot and the body as it came.
"""

from __future__ import annotations

import hashlib
import hmac


def signed(secret: str, at: int, body: bytes) -> str:
    digest = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"
