import os
import socket
import threading
import time

import pytest

from dmiddleware.process.pipes import (
    MessagePipe,
    PipeClosed,
    deadline_in,
    read_available,
)


@pytest.fixture
def ends():
    one, other = (MessagePipe(sock) for sock in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, 7, 3_000_000])
def test_messages_arrive_whole_and_in_order(ends, size):
    one, other = ends
    message = os.urandom(size)
    sender = threading.Thread(target=lambda: [one.send(message), one.send(b"next")])
    sender.start()
    assert other.receive(deadline=deadline_in(30)) == message
    assert other.receive(deadline=deadline_in(30)) == b"next"
    sender.join()


def test_receiving_times_out_at_the_deadline(ends):
    with pytest.raises(TimeoutError):
        ends[0].receive(deadline=deadline_in(0.01))
    with pytest.raises(TimeoutError):
        ends[0].receive(deadline=time.monotonic() - 5)


def test_an_incomplete_message_times_out():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((100).to_bytes(8, "little") + b"half")
        with pytest.raises(TimeoutError):
            MessagePipe(ours).receive(deadline=deadline_in(0.05))


def test_sending_to_a_peer_that_does_not_read_times_out(ends):
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(50_000_000), deadline=deadline_in(0.05))


def test_a_closed_end_raises(ends):
    one, other = ends
    assert not one.wait_until_closed(deadline=deadline_in(0.01))
    other.close()
    other.close()
    assert one.wait_until_closed(deadline=deadline_in(30))
    assert one.wait_until_closed()
    with pytest.raises(PipeClosed):
        one.receive()
    with pytest.raises(PipeClosed):
        for _ in range(3):
            one.send(b"x", deadline=deadline_in(5))


def test_an_end_closed_in_the_middle_of_a_message_raises():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall((100).to_bytes(8, "little") + b"half")
        theirs.close()
        with pytest.raises(PipeClosed):
            MessagePipe(ours).receive(deadline=deadline_in(30))


def test_a_dead_peer_is_noticed_while_another_process_holds_its_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PipeClosed):
        MessagePipe(ours, is_peer_alive=lambda: False).receive(deadline=deadline_in(60))


def test_an_open_file_can_be_sent(ends, tmp_path):
    (tmp_path / "file").write_text("content")
    with (tmp_path / "file").open() as file:
        ends[0].send_fd(file.fileno(), deadline=deadline_in(5))
    fd = ends[1].receive_fd()
    assert not os.get_inheritable(fd)
    assert os.read(fd, 10) == b"content"
    os.close(fd)
    ends[0].close()
    with pytest.raises(PipeClosed):
        ends[1].receive_fd()


def test_available_output_is_read_without_waiting_for_the_end():
    reading, writing = os.pipe()
    assert read_available(reading, wait_s=0.01) == ""
    os.write(writing, "käse".encode())
    assert read_available(reading, wait_s=30) == "käse"
    os.close(writing)
    assert read_available(reading, wait_s=30) == ""
    os.close(reading)
