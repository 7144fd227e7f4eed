"""`kvstore review`: fingerprints that wait for a person."""

from __future__ import annotations

import getpass
from typing import Any

import click

from kvstore.cli import show
from kvstore.cli.arguments import ID
from kvstore.cli.connect import Daemon, NotSo, daemon_options
from kvstore.model.reasons import Reason
from kvstore.wire import convert
from kvstore.wire.v1 import admin_pb2 as pb


@click.group(short_help="Decide on held fingerprints.")
def command() -> None:
    """Decide on fingerprints that lack a required field, or whose blocks are doubted.

    What an engine without a revision stores is read by that engine alone until somebody vouches for
    the weights. Blocks that came back damaged, or were not what an engine computes, nobody reads.
    """


@command.command("list")
@click.option("--all", "decided_too", is_flag=True, help="Decided and ended ones too.")
@daemon_options
def list_(daemon: Daemon, decided_too: bool) -> None:
    """List what waits."""
    with daemon.admin() as admin:
        reply = admin.Reviews(pb.ReviewsRequest(all=decided_too), timeout=daemon.timeout_s)
    if daemon.as_json:
        show.as_json([_as_fields(review) for review in reply.reviews])
        return
    if not reply.reviews:
        click.echo("nothing to review" if not decided_too else "nothing was ever held")
        return
    show.columns(
        ("model", "tenant", "state", "missing, or doubt", "decided", "id", "blocks", "age"),
        [
            (
                review.fingerprint.identity.model_name,
                review.tenant,
                review.state,
                ", ".join(review.missing) or review.doubt or "-",
                f"{review.decided_by}: {review.decided_why}" if review.decided_by else "-",
                review.review_id,
                f"{review.blocks:,}",
                show.seconds(review.age_s),
            )
            for review in reply.reviews
        ],
        left=5,
    )


@command.command()
@click.argument("review_id", type=ID)
@click.option(
    "--revision", default="", help="The weights revision that you vouch for, where it is missing."
)
@click.option("--reason", "why", required=True, help="Why; kept with the decision.")
@click.option("--who", default=None, help="Who decides. Default: this user.")
@daemon_options
def approve(daemon: Daemon, review_id: int, revision: str, why: str, who: str | None) -> None:
    """Vouch for the weights, or for the blocks: what is held becomes readable to all with that
    revision.
    """
    request = pb.ReviewRequest(
        review_id=review_id, approve=True, revision=revision, who=_user(who), why=why
    )
    _decide(daemon, request, "approved")


@command.command()
@click.argument("review_id", type=ID)
@click.option("--reason", "why", required=True, help="Why; kept with the decision.")
@click.option("--who", default=None, help="Who decides. Default: this user.")
@daemon_options
def reject(daemon: Daemon, review_id: int, why: str, who: str | None) -> None:
    """Drop the held blocks; later offers of this fingerprint are refused.

    Where blocks came back damaged their model begins anew instead. What an audit doubted is refused
    until the same review is approved after all.
    """
    _decide(daemon, pb.ReviewRequest(review_id=review_id, who=_user(who), why=why), "rejected")


def _decide(daemon: Daemon, request: pb.ReviewRequest, done: str) -> None:
    with daemon.admin() as admin:
        reply = admin.Review(request, timeout=daemon.timeout_s)
    reason = Reason.from_wire(reply.reason)
    accepted = reason is Reason.OK or (not request.approve and reason is Reason.REJECTED_BY_REVIEW)
    if not accepted:
        raise NotSo(f"{reason.name}: {reply.detail or reason.text}")
    if daemon.as_json:
        show.as_json(
            {
                "review_id": request.review_id,
                "decision": done,
                "space_id": reply.space_id,
                "durable": reply.durable,
            }
        )
        return
    into = f" into space {reply.space_id}" if reply.space_id else ""
    click.echo(f"{done} review {request.review_id}{into}")
    if not reply.durable:
        click.echo("not durable: the decision ends with the daemon; set state.path", err=True)


def _as_fields(review: pb.ReviewInfo) -> dict[str, Any]:
    return {
        "review_id": review.review_id,
        "tenant": review.tenant,
        "state": review.state,
        "missing": list(review.missing),
        "blocks": review.blocks,
        "age_s": review.age_s,
        "decided_by": review.decided_by,
        "decided_why": review.decided_why,
        "revision": review.revision,
        "doubt": review.doubt,
        "fingerprint": convert.fingerprint_from_wire(review.fingerprint).to_dict(),
    }


def _user(who: str | None) -> str:
    if who is not None:
        return who
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        import os

        return f"uid {os.getuid()}"
