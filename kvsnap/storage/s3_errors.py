"""What botocore raises, told apart by what one can do about it."""

from __future__ import annotations

from typing import Any

from kvsnap.errors import KvsnapError, NotFoundError, StorageError
from kvsnap.storage.base import RefusedError, ShortReadError

_DENIED = {"AccessDenied", "AllAccessDisabled", "403", "Forbidden", "AccountProblem"}
_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthFailure",
}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_KEY = {"NoSuchKey", "404", "NotFound", "NoSuchVersion"}
_BY_CHANCE = {
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",
    "IncompleteBody",
    "XAmzContentChecksumMismatch",
}


def status_of(error: Exception) -> int:
    """HTTP status of a `ClientError`; 0 for everything else."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def code_of(error: Exception) -> str:
    """S3's own code of a `ClientError`; empty for everything else."""
    return str(_response(error).get("Error", {}).get("Code") or "")


def was_retried(error: Exception) -> bool:
    """Whether the SDK had sent the request before, so that an earlier one may have had its effect."""
    return int(_response(error).get("ResponseMetadata", {}).get("RetryAttempts") or 0) > 0


def is_conflict(error: Exception) -> bool:
    """Whether a condition (`If-None-Match`, `If-Match`) did not hold."""
    return status_of(error) == 412 or code_of(error) == "PreconditionFailed"


def is_no_key(error: Exception) -> bool:
    """Whether there is no such object (a HEAD can't tell: or no such bucket)."""
    return code_of(error) in _KEY


def translate(error: Exception, what: str, bucket: str, endpoint: str) -> KvsnapError:
    """The error to raise instead of a botocore or urllib3 error met at object `what` (an `s3://` URL)."""
    if _response(error):
        return _answered(error, what, bucket, endpoint)
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"):
        return RefusedError(f"{what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile")
    if kind in ("SSLError",):
        return RefusedError(f"{what}: no secure connection to {endpoint}: {error}; check the endpoint's certificate")
    if kind in ("ParamValidationError", "UnknownEndpointError", "InvalidEndpointConfigurationError", "NoRegionError"):
        return RefusedError(f"{what}: {error}; check bucket, region and endpoint")
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"):
        return StorageError(f"{what}: {endpoint} can't be reached; check endpoint, network and proxy ({_short(error)})")
    if kind in ("ReadTimeoutError", "ReadTimeout", "TimeoutError"):
        return StorageError(f"{what}: {endpoint} did not answer in time ({_short(error)})")
    if kind in (
        "ResponseStreamingError", "IncompleteReadError", "IncompleteRead", "ProtocolError", "ConnectionResetError",
    ):  # fmt: skip
        return ShortReadError(f"{what}: the answer of {endpoint} broke off ({_short(error)})")
    return StorageError(f"{what}: {endpoint} failed: {_short(error)}")


def no_bucket(what: str, bucket: str, endpoint: str) -> RefusedError:
    """There is no such bucket."""
    return RefusedError(f"{what}: bucket {bucket} does not exist at {endpoint}; check its name, region and endpoint")


def _answered(error: Exception, what: str, bucket: str, endpoint: str) -> KvsnapError:
    code, status = code_of(error), status_of(error)
    said = f"{endpoint} answered {status} {code}: {_response(error).get('Error', {}).get('Message') or 'no message'}"
    if code == "NoSuchBucket":
        return RefusedError(
            f"{what}: bucket {bucket} does not exist at {endpoint}; check its name, region and endpoint"
        )
    if code in _KEY:
        return NotFoundError(f"{what} does not exist")
    if code in _CREDENTIALS:
        return RefusedError(f"{what}: the credentials are not accepted; check key, secret and profile ({said})")
    if code in _REGION or status in (301, 307):
        return RefusedError(f"{what}: bucket {bucket} is in another region; set region ({said})")
    if code == "RequestTimeTooSkewed":
        return RefusedError(f"{what}: this machine's clock is wrong ({said})")
    if code in _BY_CHANCE or status in (408, 409, 429, 500, 502, 503, 504):
        return StorageError(f"{what}: the store is busy or failed for now ({said})")
    if code in _DENIED or status in (401, 403):
        return RefusedError(
            f"{what}: access denied; check credentials and policy (s3:GetObject, s3:PutObject, s3:DeleteObject, "
            f"s3:ListBucket, the KMS key's) and, without s3:ListBucket, whether the object exists ({said})"
        )
    if status == 507 or code in ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"):
        return RefusedError(f"{what}: the store has no room left ({said})")
    if status == 412:
        return StorageError(f"{what}: somebody else wrote it meanwhile ({said})")
    if status >= 500 and status != 501:
        return StorageError(f"{what}: the store failed ({said})")
    return RefusedError(f"{what}: the store refused the request ({said})")


def _response(error: Exception) -> dict[str, Any]:
    found = getattr(error, "response", None)
    return found if isinstance(found, dict) else {}


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
