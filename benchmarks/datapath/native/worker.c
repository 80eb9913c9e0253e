// Owns the mock worker: an OpenAI-style server that costs next to nothing. One thread, epoll, loopback only.
//
//     worker PORT
//
// POST /v1/chat/completions, /v1/completions, /generate: a JSON answer of about 600 bytes or, with "stream":true, an event
// stream. What a request's JSON may ask for: "max_tokens" events (50), "seed" milliseconds apart (0: one at each turn of the
// loop). Every answer and every event holds "@<CLOCK_MONOTONIC in ns, 16 digits>@": when it was made.
// POST /tokenize, and GET on the paths by which routers learn about a worker: short fitting answers. Else: 404.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, FIRST_INPUT = 65536, KEPT_INPUT = 4 << 20, READ_AT_LEAST = 32768, OUTPUT_HIGH = 65536 };

typedef struct {
    char *data;
    size_t size, used;
} Buffer;

typedef struct {
    int fd;
    Buffer in, out;
    size_t written;      // bytes of `out` that the kernel has
    bool wants_writable; // registered for EPOLLOUT
    int place;           // in `streams`, or -1
    long events_left, events_sent;
    uint64_t id, gap, next_event; // of its stream; nanoseconds
} Connection;

static int poller, port;
static uint64_t answers;
static Connection **streams; // connections in the middle of an event stream
static int stream_count, stream_room;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void reserve(Buffer *b, size_t more) {
    if (b->size - b->used >= more) return;
    b->size = (b->used + more) * 2;
    if (!(b->data = realloc(b->data, b->size))) abort();
}

static void append(Buffer *b, const char *data, size_t n) {
    reserve(b, n);
    memcpy(b->data + b->used, data, n);
    b->used += n;
}

static void begin_stream(Connection *c) {
    if (stream_count == stream_room) {
        stream_room = stream_room ? stream_room * 2 : 256;
        if (!(streams = realloc(streams, stream_room * sizeof *streams))) abort();
    }
    c->place = stream_count;
    streams[stream_count++] = c;
}

static void end_stream(Connection *c) {
    if (c->place < 0) return;
    streams[c->place] = streams[--stream_count];
    streams[c->place]->place = c->place;
    c->place = -1;
}

static void drop(Connection *c) {
    end_stream(c);
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c);
}

static void watch(Connection *c, bool writable) {
    if (c->wants_writable == writable) return;
    struct epoll_event e = {writable ? EPOLLIN | EPOLLOUT : EPOLLIN, {.ptr = c}};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
    c->wants_writable = writable;
}

// Writes what the kernel takes. False: the connection is broken.
static bool flush(Connection *c) {
    while (c->written < c->out.used) {
        ssize_t n = send(c->fd, c->out.data + c->written, c->out.used - c->written, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return false;
            watch(c, true);
            return true;
        }
        c->written += (size_t)n;
    }
    c->written = c->out.used = 0;
    watch(c, false);
    return true;
}

static void answer(Connection *c, int status, const char *body, size_t n) {
    char head[256];
    int k = sprintf(head,
                    "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
                    "server: mock\r\ncontent-length: %zu\r\n\r\n",
                    status, status == 200 ? "OK" : "Not Found", n);
    append(&c->out, head, (size_t)k);
    append(&c->out, body, n);
}

static void answer_completion(Connection *c) {
    static const char text[] =
        "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna "
        "aliqua ut enim ad minim veniam quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo";
    char body[1024];
    int n = sprintf(body,
                    "{\"id\":\"chatcmpl-%08llx\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"mock\","
                    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"@%016llu@ %s\"},"
                    "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":128,"
                    "\"completion_tokens\":64,\"total_tokens\":192},\"system_fingerprint\":\"fp_mock_%05d\"}",
                    (unsigned long long)++answers, (unsigned long long)now(), text, port);
    answer(c, 200, body, (size_t)n);
}

static void append_event(Connection *c) {
    char event[512], chunk[600];
    int n = sprintf(event,
                    "data: {\"id\":\"chatcmpl-%08llx\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@%016llu@ tok\"},"
                    "\"finish_reason\":null}]}\n\n",
                    (unsigned long long)c->id, (unsigned long long)now());
    append(&c->out, chunk, (size_t)sprintf(chunk, "%x\r\n%s\r\n", n, event));
}

// One token for four bytes, as vLLM words it.
static void answer_tokens(Connection *c, const char *body, size_t n) {
    Buffer text = {0};
    reserve(&text, n / 4 * 6 + 128);
    char *p = text.data;
    p += sprintf(p, "{\"count\":%zu,\"max_model_len\":1048576,\"tokens\":[", n / 4);
    for (size_t i = 0; i < n / 4; i++) {
        const unsigned char *b = (const unsigned char *)body + 4 * i;
        p += sprintf(p, i ? ",%u" : "%u", (b[0] * 257u + b[1] * 31u + b[2]) % 60000u);
    }
    p += sprintf(p, "]}");
    answer(c, 200, text.data, (size_t)(p - text.data));
    free(text.data);
}

static void answer_get(Connection *c, const char *path) {
    static const char health[] = "{\"status\":\"ok\"}", version[] = "{\"version\":\"0.10.0\"}";
    static const char models[] =
        "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
        "\"owned_by\":\"mock\",\"root\":\"mock\",\"max_model_len\":1048576}]}";
    static const char model[] =
        "{\"model_path\":\"mock\",\"tokenizer_path\":\"mock\",\"served_model_name\":\"mock\",\"is_generation\":true}";
    static const char server[] =
        "{\"model_id\":\"mock\",\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"version\":\"0.5.0\","
        "\"tp_size\":1,\"dp_size\":1,\"internal_states\":[]}";
    static const char load[] = "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]";
    static const struct {
        const char *path, *body;
    } known[] = {
        {"/health", health},        {"/ping", health},        {"/liveness", health},      {"/readiness", health},
        {"/version", version},      {"/v1/models", models},   {"/get_model_info", model}, {"/model_info", model},
        {"/get_server_info", server}, {"/server_info", server}, {"/get_load", load},      {"/v1/loads", load},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strncmp(path, known[i].path, strlen(known[i].path))) {
            answer(c, 200, known[i].body, strlen(known[i].body));
            return;
        }
    answer(c, 404, "{}", 2);
}

static long number_in(const char *json, size_t n, const char *key, long otherwise) {
    const char *p = memmem(json, n, key, strlen(key));
    if (!p) return otherwise;
    for (p += strlen(key); p < json + n && (*p == ' ' || *p == ':');) p++;
    return strtol(p, NULL, 10);
}

static void serve(Connection *c, const char *head, const char *body, size_t n) {
    if (!strncmp(head, "GET ", 4)) {
        answer_get(c, head + 4);
    } else if (!strncmp(head, "POST /tokenize ", 15)) {
        answer_tokens(c, body, n);
    } else if (strncmp(head, "POST /v1/chat/completions ", 26) && strncmp(head, "POST /v1/completions ", 21) &&
               strncmp(head, "POST /generate ", 15)) {
        answer(c, 404, "{}", 2);
    } else if (!memmem(body, n, "\"stream\":true", 13) && !memmem(body, n, "\"stream\": true", 14)) {
        answer_completion(c);
    } else {
        static const char stream_head[] =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            "date: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: mock\r\ntransfer-encoding: chunked\r\n\r\n";
        append(&c->out, stream_head, sizeof stream_head - 1);
        c->id = ++answers;
        c->events_left = number_in(body, n, "\"max_tokens\"", number_in(body, n, "\"max_completion_tokens\"", 50));
        c->gap = (uint64_t)number_in(body, n, "\"seed\"", 0) * 1000000u;
        c->events_sent = 0;
        c->next_event = now();
        begin_stream(c);
    }
}

// Decodes a chunked body in place; its length, or -1 while it isn't all there. `*end` is set to where it ends.
static ssize_t dechunk(char *in, size_t n, size_t *end) {
    size_t from = 0, at = 0;
    for (int pass = 0; pass < 2; pass++) { // look first, move then: a body that isn't complete stays as it is
        for (from = at = 0;;) {
            char *line = memmem(in + from, n - from, "\r\n", 2);
            if (!line) return -1;
            size_t size = strtoul(in + from, NULL, 16), data = (size_t)(line + 2 - in);
            if (n < data + size + 2) return -1;
            if (pass) memmove(in + at, in + data, size);
            at += size;
            from = data + size + 2;
            if (!size) break;
        }
    }
    *end = from;
    return (ssize_t)at;
}

// Serves the requests that are complete, one after the other, until one begins a stream.
static void serve_all(Connection *c) {
    while (c->place < 0 && c->in.used) {
        char *in = c->in.data, *blank = memmem(in, c->in.used, "\r\n\r\n", 4);
        if (!blank) return;
        size_t head = (size_t)(blank + 4 - in), n = 0, end = head;
        blank[2] = 0; // so that searches stop at the head's end
        char *length = strcasestr(in, "\r\ncontent-length:");
        bool chunked = strcasestr(in, "\r\ntransfer-encoding: chunked");
        blank[2] = '\r';
        if (length) {
            n = strtoul(length + 17, NULL, 10);
            end = head + n;
            if (c->in.used < end) {
                reserve(&c->in, end - c->in.used + 1);
                return;
            }
        } else if (chunked) {
            ssize_t got = dechunk(in + head, c->in.used - head, &end);
            if (got < 0) return;
            n = (size_t)got;
            end += head;
        }
        serve(c, in, in + head, n);
        memmove(in, in + end, c->in.used - end);
        c->in.used -= end;
        if (!c->in.used && c->in.size > KEPT_INPUT) {
            free(c->in.data);
            c->in = (Buffer){0};
        }
    }
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        Connection *c = calloc(1, sizeof *c);
        if (!c) abort();
        c->fd = fd;
        c->place = -1;
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
    }
}

static void on_event(Connection *c, uint32_t events) {
    bool alive = !(events & (EPOLLERR | EPOLLHUP));
    if (alive && events & EPOLLIN) {
        reserve(&c->in, c->in.size ? READ_AT_LEAST : FIRST_INPUT);
        ssize_t n = recv(c->fd, c->in.data + c->in.used, c->in.size - c->in.used - 1, 0);
        if (n > 0) {
            c->in.used += (size_t)n;
            c->in.data[c->in.used] = 0;
            serve_all(c);
        } else {
            alive = n < 0 && errno == EAGAIN;
        }
    }
    if (!alive || !flush(c)) drop(c);
}

static bool waits_for_reader(const Connection *c) { return c->out.used - c->written > OUTPUT_HIGH; }

// Milliseconds until an event is due; sleeps the rest of less than one.
static int until_next_event(void) {
    uint64_t next = UINT64_MAX, t = now();
    for (int i = 0; i < stream_count; i++)
        if (!waits_for_reader(streams[i]) && streams[i]->next_event < next) next = streams[i]->next_event;
    if (next == UINT64_MAX) return stream_count ? 100 : -1;
    if (next <= t) return 0;
    if (next - t < 1000000u) usleep((useconds_t)((next - t) / 1000));
    return (int)((next - t) / 1000000u);
}

static void send_due_events(void) {
    uint64_t t = now();
    for (int i = stream_count - 1; i >= 0; i--) {
        Connection *c = streams[i];
        if (waits_for_reader(c) || c->next_event > t) continue;
        if (c->events_left > 0) {
            append_event(c);
            c->events_left--;
            // The first gap is of a length of its own, so that streams that begin together don't go on together.
            c->next_event += c->events_sent++ ? c->gap : c->gap / 2 + c->id * 2654435761u % 1000 * c->gap / 1000;
        }
        if (c->events_left <= 0) {
            static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
            append(&c->out, end, sizeof end - 1);
            end_stream(c);
            serve_all(c);
        }
        if (!flush(c)) drop(c);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: worker PORT\n");
        return 2;
    }
    port = atoi(argv[1]);
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) {
        perror("worker");
        return 1;
    }
    poller = epoll_create1(0);
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &(struct epoll_event){EPOLLIN, {.ptr = NULL}});
    for (struct epoll_event ready[EVENTS];;) {
        int n = epoll_wait(poller, ready, EVENTS, until_next_event());
        for (int i = 0; i < n; i++) {
            if (ready[i].data.ptr)
                on_event(ready[i].data.ptr, ready[i].events);
            else
                accept_all(listener);
        }
        send_due_events();
    }
}
