"""Signed HTTP between a master, which gives tasks, and slaves, which do them."""

from dmiddleware.worker.comm.http.master import HttpTask, Master, SlaveConnection
from dmiddleware.worker.comm.http.server import Code
from dmiddleware.worker.comm.http.signing import HttpNode, read_key, sign
from dmiddleware.worker.comm.http.slave import Slave

__all__ = ["Slave", "Master", "SlaveConnection", "HttpTask", "Code", "HttpNode", "read_key", "sign"]
