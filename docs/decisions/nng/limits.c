/* What nng can limit before a peer has authenticated, in nng's own C functions.
 *
 *   NNG=$(python -c 'import pynng._nng as n; print(n.__file__)')
 *   cc -O1 -o limits limits.c "$NNG" -Wl,-rpath,"$(dirname "$NNG")" \
 *      -Wl,--unresolved-symbols=ignore-in-shared-libs -lpthread
 *   ./limits silent | memory | pipelining | race | socket
 *
 * The attackers are forked processes with plain sockets; only one process uses nng.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The parts of nng 1.11's interface that are used here; pynng ships no headers. */
typedef struct { uint32_t id; } nng_socket, nng_ctx, nng_pipe, nng_listener, nng_dialer;
typedef struct nng_aio nng_aio;
typedef struct nng_msg nng_msg;
enum { ADD_PRE = 0, ADD_POST = 1, REM_POST = 2 };
const char *nng_version(void);
const char *nng_strerror(int);
int nng_rep0_open(nng_socket *);
int nng_req0_open(nng_socket *);
int nng_close(nng_socket);
int nng_listen(nng_socket, const char *, nng_listener *, int);
int nng_dial(nng_socket, const char *, nng_dialer *, int);
int nng_listener_create(nng_listener *, nng_socket, const char *);
int nng_listener_start(nng_listener, int);
int nng_listener_set_int(nng_listener, const char *, int);
int nng_listener_set_size(nng_listener, const char *, size_t);
int nng_socket_set_size(nng_socket, const char *, size_t);
int nng_socket_set_ms(nng_socket, const char *, int32_t);
int nng_pipe_notify(nng_socket, int, void (*)(nng_pipe, int, void *), void *);
int nng_pipe_close(nng_pipe);
int nng_ctx_open(nng_ctx *, nng_socket);
void nng_ctx_send(nng_ctx, nng_aio *);
void nng_ctx_recv(nng_ctx, nng_aio *);
int nng_aio_alloc(nng_aio **, void (*)(void *), void *);
void nng_aio_free(nng_aio *);
void nng_aio_wait(nng_aio *);
int nng_aio_result(nng_aio *);
bool nng_aio_busy(nng_aio *);
void nng_aio_set_timeout(nng_aio *, int32_t);
void nng_aio_set_msg(nng_aio *, nng_msg *);
nng_msg *nng_aio_get_msg(nng_aio *);
int nng_msg_alloc(nng_msg **, size_t);
void nng_msg_free(nng_msg *);
void *nng_msg_body(nng_msg *);
int nng_recvmsg(nng_socket, nng_msg **, int);
int nng_sendmsg(nng_socket, nng_msg *, int);

char _Py_NoneStruct[64]; /* The library's Python wrapper refers to it. */

#define MB (1 << 20)
#define CHECK(call)                                                              \
  do {                                                                           \
    int rv_ = (call);                                                            \
    if (rv_) printf("%s: %s\n", #call, nng_strerror(rv_)), exit(2);              \
  } while (0)

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static void pause_ms(long ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

static int descriptors(void) {
  int n = -3; /* ".", ".." and the folder itself */
  DIR *folder = opendir("/proc/self/fd");
  if (!folder) return -1;
  while (readdir(folder)) n++;
  closedir(folder);
  return n;
}

static double memory_mb(void) {
  long all, resident;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &all, &resident) != 2) exit(2);
  fclose(file);
  return resident * 4096.0 / MB;
}

static int port_for_test(void) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof at;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(fd, (void *)&at, size) || getsockname(fd, (void *)&at, &size)) exit(2);
  close(fd);
  return ntohs(at.sin_port);
}

static int plain_dial(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                           .sin_port = htons(port)};
  for (int tries = 0; tries < 2000; tries++) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (void *)&at, sizeof at) == 0) return fd;
    if (fd >= 0) close(fd);
    pause_ms(5);
  }
  exit(3);
}

static void plain_write(int fd, const void *what, size_t size) {
  for (const char *at = what; size;) {
    ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
    if (n <= 0) return;
    at += n, size -= n;
  }
}

static void greet(int fd) {
  char theirs[8];
  plain_write(fd, "\0SP\0\0\x30\0\0", 8);
  if (recv(fd, theirs, 8, MSG_WAITALL) != 8) exit(3);
}

static void plain_request(int fd, uint32_t number, const char *body, uint32_t size) {
  uint32_t head[3] = {0, htonl(size + 4), htonl(0x80000000u | number)};
  plain_write(fd, head, 12);
  plain_write(fd, body, size);
}

static int n_pre;
static void count_pipe(nng_pipe pipe, int event, void *arg) { n_pre++; }

static nng_socket replier(int port, size_t max_bytes) {
  char url[64];
  nng_socket socket;
  nng_listener listener;
  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  CHECK(nng_rep0_open(&socket));
  CHECK(nng_pipe_notify(socket, ADD_PRE, count_pipe, NULL));
  CHECK(nng_socket_set_size(socket, "recv-size-max", max_bytes));
  CHECK(nng_listen(socket, url, &listener, 0));
  return socket;
}

/* 1: silent connections. */

static void silent(int count, int lasts_s) {
  int port = port_for_test();
  pid_t attacker = fork();
  if (!attacker) {
    int *fds = malloc(count * sizeof *fds);
    for (int i = 0; i < count; i++) fds[i] = plain_dial(port);
    for (;;) { /* Connect again whatever was closed. */
      for (int i = 0; i < count; i++) {
        char got[64];
        ssize_t n;
        while ((n = recv(fds[i], got, sizeof got, MSG_DONTWAIT)) > 0) continue;
        if (n == 0 || errno == ECONNRESET) close(fds[i]), fds[i] = plain_dial(port);
      }
      pause_ms(20);
    }
  }
  int before = descriptors();
  nng_socket socket = replier(port, MB);
  double start = seconds();
  printf("%d silent connections, opened again whenever nng closes one\n", count);
  for (int second = 1; second <= lasts_s; second += second < 4 ? 1 : 4) {
    pause_ms((long)((start + second - seconds()) * 1000));
    printf("  after %2d s: %d descriptors, %d pipes reported to the application\n", second,
           descriptors() - before, n_pre);
    fflush(stdout);
  }
  kill(attacker, SIGKILL), waitpid(attacker, NULL, 0);
  nng_close(socket);

  n_pre = 0, port = port_for_test();
  if (!(attacker = fork())) {
    struct rlimit all = {4096, 4096};
    setrlimit(RLIMIT_NOFILE, &all);
    for (int i = 0; i < count; i++) plain_dial(port);
    for (;;) pause();
  }
  struct rlimit few = {count / 2, count / 2};
  socket = replier(port, MB);
  setrlimit(RLIMIT_NOFILE, &few);
  pause_ms(2000);
  FILE *file = fopen("/proc/self/status", "r");
  printf("  with a limit of %d descriptors: opening a file: %s\n", count / 2,
         file ? "works" : strerror(errno));
  kill(attacker, SIGKILL), waitpid(attacker, NULL, 0);
}

/* 2: memory before authentication. */

static void memory(int connections, size_t size, size_t lowered) {
  int port = port_for_test();
  pid_t attacker = fork();
  if (!attacker) {
    char *body = calloc(1, MB);
    for (int i = 0; i < connections; i++) {
      if (fork()) continue;
      int fd = plain_dial(port);
      greet(fd);
      pause_ms(1000);
      uint32_t head[3] = {0, htonl(size), htonl(0x80000001u)};
      plain_write(fd, head, 12);
      for (size_t sent = MB; sent < size; sent += MB) plain_write(fd, body, MB);
      for (;;) pause();
    }
    for (;;) pause();
  }
  setpgid(attacker, attacker);
  nng_socket socket = replier(port, size);
  double before = memory_mb();
  pause_ms(500);
  if (lowered) { /* all are connected and have sent nothing yet */
    int rv = nng_socket_set_size(socket, "recv-size-max", lowered);
    printf("  limit lowered to %zu bytes after they connected: %s\n", lowered, nng_strerror(rv));
  }
  pause_ms(4500);
  printf("  %d connections without a key, limit %zu MB: %.0f MB\n", connections, size / MB,
         memory_mb() - before);
  fflush(stdout);
  kill(-attacker, SIGKILL), waitpid(attacker, NULL, 0);
  nng_close(socket);
}

/* 3: requests without reading the replies. */

#define REPLY (64 * 1024)
#define MAX_CONTEXTS 100000

struct context { nng_ctx ctx; nng_aio *recv, *send; };

static struct context *open_context(nng_socket socket) {
  struct context *c = calloc(1, sizeof *c);
  CHECK(nng_ctx_open(&c->ctx, socket));
  CHECK(nng_aio_alloc(&c->recv, NULL, NULL));
  CHECK(nng_aio_alloc(&c->send, NULL, NULL));
  return c;
}

static void pipelining(int n_contexts) {
  int port = port_for_test();
  pid_t attacker = fork();
  if (!attacker) {
    int fd = plain_dial(port);
    greet(fd);
    for (uint32_t i = 1;; i++) plain_request(fd, i, "x", 1);
  }
  pid_t honest = fork();
  if (!honest) {
    char reply[REPLY + 12];
    int fd = plain_dial(port), n = 0;
    struct timeval limit = {3, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    greet(fd);
    pause_ms(1500);
    for (; n < 10; n++) {
      plain_request(fd, n + 1, "x", 1);
      if (recv(fd, reply, sizeof reply, MSG_WAITALL) != sizeof reply) break;
    }
    _exit(n);
  }
  nng_socket socket = replier(port, MB);
  struct context **all = calloc(MAX_CONTEXTS, sizeof *all);
  int opened = 0, status;
  double before = memory_mb(), start = seconds();
  while (seconds() < start + 6 && opened < MAX_CONTEXTS) {
    struct context *c = NULL;
    for (int i = 0; i < opened && !c; i++)
      if (!nng_aio_busy(all[i]->send)) c = all[i];
    if (!c && (!n_contexts || opened < n_contexts)) c = all[opened++] = open_context(socket);
    if (!c) { pause_ms(1); continue; }
    nng_aio_set_timeout(c->recv, 500);
    nng_ctx_recv(c->ctx, c->recv);
    nng_aio_wait(c->recv);
    if (nng_aio_result(c->recv)) continue;
    nng_msg *reply;
    nng_msg_free(nng_aio_get_msg(c->recv));
    CHECK(nng_msg_alloc(&reply, REPLY));
    nng_aio_set_msg(c->send, reply);
    nng_ctx_send(c->ctx, c->send);
    if (memory_mb() - before > 1500) break;
  }
  printf("  %s contexts: %d opened, %.0f MB after %.1f s; ", n_contexts ? "at most 64" : "any number of",
         opened, memory_mb() - before, seconds() - start);
  fflush(stdout);
  waitpid(honest, &status, 0);
  printf("another connection got %d of 10 replies\n", WEXITSTATUS(status));
  kill(attacker, SIGKILL), waitpid(attacker, NULL, 0);
  fflush(stdout);
  _exit(0);
}

/* 4: a timeout that races with the close of its socket. */

static void race_once(const char *url, int n_contexts, int timeout_ms, int wait_us) {
  nng_socket socket;
  struct context *all[64];
  CHECK(nng_req0_open(&socket));
  CHECK(nng_socket_set_ms(socket, "req:resend-time", -1));
  CHECK(nng_dial(socket, url, NULL, 0));
  for (int i = 0; i < n_contexts; i++) {
    nng_msg *request;
    all[i] = open_context(socket);
    CHECK(nng_msg_alloc(&request, 8));
    nng_aio_set_msg(all[i]->send, request);
    nng_ctx_send(all[i]->ctx, all[i]->send);
    nng_aio_wait(all[i]->send);
    nng_aio_set_timeout(all[i]->recv, timeout_ms);
    nng_ctx_recv(all[i]->ctx, all[i]->recv);
  }
  struct timespec t = {0, wait_us * 1000};
  nanosleep(&t, NULL);
  nng_close(socket);
  for (int i = 0; i < n_contexts; i++) {
    nng_aio_free(all[i]->recv), nng_aio_free(all[i]->send);
    free(all[i]);
  }
}

static void race(int runs, int rounds, int timeout_ms) {
  int aborted = 0, total = 0;
  printf("%d runs of %d closes, 16 requests each, %s\n", runs, rounds,
         timeout_ms > 0 ? "with a timeout of 30 ms" : "without timeouts");
  for (int run = 0; run < runs; run++) {
    int done[2], n = 0;
    char one;
    if (pipe(done)) exit(2);
    pid_t child = fork();
    if (!child) {
      char url[64];
      int port = port_for_test();
      replier(port, MB); /* It never replies. */
      snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
      srand(run);
      for (int i = 0; i < rounds; i++) {
        race_once(url, 16, timeout_ms, 29000 + rand() % 2000);
        if (write(done[1], "x", 1) != 1) exit(2);
      }
      _exit(0);
    }
    close(done[1]);
    while (read(done[0], &one, 1) == 1) n++;
    close(done[0]);
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
      aborted++;
      printf("  run %d: %s after %d closes\n", run, strsignal(WTERMSIG(status)), n);
    } else {
      printf("  run %d: %d closes, exit status %d\n", run, n, WEXITSTATUS(status));
    }
    total += n;
    fflush(stdout);
  }
  printf("%d of %d runs ended by a signal, %d closes in all\n", aborted, runs, total);
}

/* 5: connections that this program has accepted, handed to nng as descriptors. */

static void *echo(void *arg) {
  nng_msg *message;
  while (!nng_recvmsg(*(nng_socket *)arg, &message, 0)) nng_sendmsg(*(nng_socket *)arg, message, 0);
  return NULL;
}

static void *plain_echo(void *arg) {
  char got[72];
  while (recv(*(int *)arg, got, sizeof got, MSG_WAITALL) == sizeof got)
    plain_write(*(int *)arg, got, sizeof got);
  return NULL;
}

static void connected(int fds[2]) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof at;
  int yes = 1, listening = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listening, (void *)&at, size) || getsockname(listening, (void *)&at, &size) ||
      listen(listening, 1))
    exit(2);
  fds[0] = plain_dial(ntohs(at.sin_port)), fds[1] = accept(listening, NULL, NULL);
  for (int i = 0; i < 2; i++) setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  close(listening);
}

static int by_value(const void *a, const void *b) {
  return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

static void report(const char *name, double *took) {
  qsort(took, 2000, sizeof *took, by_value);
  printf("  %s: %.0f us for a request of 64 bytes and its reply (median)\n", name, took[1000] * 1e6);
}

static void ask(const char *name, nng_socket socket) {
  double took[2000];
  for (int i = 0; i < 2000; i++) {
    nng_msg *message;
    CHECK(nng_msg_alloc(&message, 64));
    took[i] = seconds();
    CHECK(nng_sendmsg(socket, message, 0));
    CHECK(nng_recvmsg(socket, &message, 0));
    took[i] = seconds() - took[i];
    nng_msg_free(message);
  }
  report(name, took);
}

static void handed_over(void) {
  int fds[2], port = port_for_test();
  char url[64], body[72] = {0};
  double took[2000];
  pthread_t thread;
  nng_socket req, rep = replier(port, MB), own_req, own_rep;
  nng_listener ours, theirs;
  nng_dialer dialer;
  connected(fds);
  pthread_create(&thread, NULL, plain_echo, &fds[1]);
  for (int i = 0; i < 2000; i++) {
    took[i] = seconds();
    plain_write(fds[0], body, sizeof body);
    recv(fds[0], body, sizeof body, MSG_WAITALL);
    took[i] = seconds() - took[i];
  }
  report("plain tcp socket and a thread", took);

  snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
  pthread_create(&thread, NULL, echo, &rep);
  CHECK(nng_req0_open(&req));
  CHECK(nng_dial(req, url, &dialer, 0));
  ask("nng, tcp://", req);

  connected(fds);
  CHECK(nng_rep0_open(&own_rep));
  CHECK(nng_req0_open(&own_req));
  CHECK(nng_listener_create(&theirs, own_rep, "socket://"));
  CHECK(nng_listener_create(&ours, own_req, "socket://"));
  CHECK(nng_listener_start(theirs, 0));
  CHECK(nng_listener_start(ours, 0));
  CHECK(nng_listener_set_int(ours, "socket:fd", fds[0]));
  CHECK(nng_listener_set_int(theirs, "socket:fd", fds[1]));
  pthread_create(&thread, NULL, echo, &own_rep);
  ask("nng, socket://", own_req);
  printf("  a dialer for socket://: %s\n", nng_strerror(nng_dial(own_req, "socket://", &dialer, 0)));
  printf("  tls+socket://: %s\n",
         nng_strerror(nng_listener_create(&ours, own_rep, "tls+socket://")));
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "";
  signal(SIGPIPE, SIG_IGN);
  printf("nng %s\n", nng_version());
  fflush(stdout);
  if (!strcmp(what, "silent")) {
    silent(argc > 2 ? atoi(argv[2]) : 300, argc > 3 ? atoi(argv[3]) : 24);
  } else if (!strcmp(what, "memory")) {
    memory(8, 256 * MB, 0);
    memory(8, 256 * MB, 4096);
  } else if (!strcmp(what, "pipelining")) {
    pid_t child = fork();
    if (!child) pipelining(0);
    waitpid(child, NULL, 0);
    pipelining(64);
  } else if (!strcmp(what, "race")) {
    race(argc > 2 ? atoi(argv[2]) : 6, argc > 3 ? atoi(argv[3]) : 500, 30);
    race(1, argc > 3 ? atoi(argv[3]) : 500, -1);
  } else if (!strcmp(what, "socket")) {
    handed_over();
  } else {
    fprintf(stderr, "usage: limits silent | memory | pipelining | race | socket\n");
    return 2;
  }
  return 0;
}
