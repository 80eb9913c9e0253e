// Owns the load: HTTP clients that cost next to nothing. One thread, epoll, loopback only; prints one line of JSON.
//
//     load PORT [-c CONNECTIONS] [-d SECONDS] [-n REQUESTS] [-R MILLISECONDS] [-s] [-k EVENTS] [-g MILLISECONDS]
//          [-b BYTES] [-u PROMPTS] [-i FIRST] [-f SHARE]
//
// Closed loop: each connection sends its next request when it has its answer, until SECONDS are over or REQUESTS are sent.
// -R: the connections begin one after the other within this time. -s: event streams, of EVENTS events (-k), -g apart.
// -b: bytes of a body. Prompts differ in one number, counted from FIRST (-i), which stands behind the first SHARE (-f, 0 to
// 1) of the text: so much of it they have in common. -u: the numbers begin anew after PROMPTS requests (1: all are equal; 0:
// never).
// Latencies are in microseconds; "late" is how long an event took from the worker to here.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READY = 512, HEAD = 8192, LINE = 1024, GRACE_SECONDS = 5, STAMP_DIGITS = 10 };

typedef enum { READ_HEAD, READ_LENGTH, READ_UNTIL_CLOSE, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER } State;

typedef struct {
    int fd;
    bool busy, wants_writable, keep_alive, seen_event;
    char *request, *stamp; // its own copy of the request, and the number therein
    size_t sent;
    uint64_t began;
    State state;
    int status;
    size_t left; // bytes of the body, or of its chunk
    char head[HEAD], line[LINE];
    size_t head_used, line_used, trailer_used;
} Client;

typedef struct {
    uint32_t *tenths; // of a microsecond
    size_t count, room;
} Times;

static int poller, port, clients = 1, events = 50, gap, ramp;
static bool stream;
static double seconds = 5, share;
static long most = -1, prompts = 1, first_prompt;
static size_t body_bytes, request_bytes;
static struct sockaddr_in server;
static Times latency, first_event, lateness;
static long started, done, errors, not_ok, seen_events;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void note(Times *times, uint64_t ns) {
    if (times->count == times->room) {
        times->room = times->room ? times->room * 2 : 65536;
        if (!(times->tenths = realloc(times->tenths, times->room * sizeof *times->tenths))) abort();
    }
    times->tenths[times->count++] = ns / 100 > UINT32_MAX ? UINT32_MAX : (uint32_t)(ns / 100);
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile(const Times *sorted, double p) {
    return sorted->count ? sorted->tenths[(size_t)(p * (double)(sorted->count - 1) + 0.5)] / 10.0 : 0;
}

// Gives each client a copy of the request, with a place for the number that makes its prompt differ from others.
static void write_requests(Client *all) {
    char *body = malloc(body_bytes + 4096), *p = body;
    p += sprintf(p,
                 "{\"model\":\"mock\",\"stream\":%s,\"max_tokens\":%d,\"seed\":%d,\"temperature\":0.7,\"messages\":["
                 "{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},{\"role\":\"user\",\"content\":\"",
                 stream ? "true" : "false", events, gap);
    char *stamp = NULL;
    size_t shared = (size_t)(share * (double)body_bytes);
    unsigned word = 12345;
    for (;;) {
        if (!stamp && (size_t)(p - body) >= shared) {
            stamp = p;
            p += sprintf(p, "%0*d ", STAMP_DIGITS, 0);
        }
        if ((size_t)(p - body) + 48 >= body_bytes) break;
        word = word * 1103515245 + 12345;
        p += sprintf(p, "w%u ", (word >> 16) % 5000);
    }
    if (!stamp) stamp = p, p += sprintf(p, "%0*d ", STAMP_DIGITS, 0);
    p += sprintf(p, "Hello, what is the answer?\"}]}");
    char head[512];
    size_t n = (size_t)(p - body);
    size_t k = (size_t)sprintf(head,
                               "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: load/1\r\n"
                               "Accept: */*\r\nAuthorization: Bearer sk-test\r\nContent-Type: application/json\r\n"
                               "Content-Length: %zu\r\n\r\n",
                               port, n);
    request_bytes = k + n;
    for (int i = 0; i < clients; i++) {
        if (!(all[i].request = malloc(request_bytes))) abort();
        memcpy(all[i].request, head, k);
        memcpy(all[i].request + k, body, n);
        all[i].stamp = all[i].request + k + (stamp - body);
    }
    free(body);
}

static void watch(Client *c, bool writable) {
    if (c->wants_writable == writable) return;
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &(struct epoll_event){writable ? EPOLLIN | EPOLLOUT : EPOLLIN, {.ptr = c}});
    c->wants_writable = writable;
}

static void hang_up(Client *c) {
    close(c->fd);
    c->fd = -1;
    c->wants_writable = false;
}

static void write_on(Client *c) {
    while (c->sent < request_bytes) {
        ssize_t n = send(c->fd, c->request + c->sent, request_bytes - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            if (errno == EAGAIN) watch(c, true);
            return; // a broken connection shows itself to the reader
        }
        c->sent += (size_t)n;
    }
    watch(c, false);
}

static void start(Client *c) {
    if (c->fd < 0) {
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&server, sizeof server)) {
            errors++;
            started++;
            if (c->fd >= 0) hang_up(c);
            return;
        }
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
    }
    long number = first_prompt + (prompts ? started % prompts : started);
    for (int i = STAMP_DIGITS; i--; number /= 10) c->stamp[i] = (char)('0' + number % 10);
    started++;
    c->busy = true;
    c->state = READ_HEAD;
    c->head_used = c->line_used = c->sent = 0;
    c->seen_event = false;
    c->began = now();
    write_on(c);
}

static void finish(Client *c, uint64_t t) {
    c->busy = false;
    done++;
    not_ok += c->status != 200;
    note(&latency, t - c->began);
}

static void on_line(Client *c, uint64_t t) {
    if (c->line_used < 5 || memcmp(c->line, "data:", 5) || memmem(c->line, c->line_used, "[DONE]", 6)) return;
    seen_events++;
    if (!c->seen_event) note(&first_event, t - c->began);
    c->seen_event = true;
    char *made = memchr(c->line, '@', c->line_used);
    if (made && made + 17 < c->line + c->line_used) {
        uint64_t at = strtoull(made + 1, NULL, 10);
        if (at && t >= at) note(&lateness, t - at);
    }
}

static void on_body(Client *c, const char *p, size_t n, uint64_t t) {
    while (stream && n) {
        const char *end = memchr(p, '\n', n);
        size_t k = end ? (size_t)(end - p) : n, kept = k < LINE - c->line_used ? k : LINE - c->line_used;
        memcpy(c->line + c->line_used, p, kept);
        c->line_used += kept;
        if (!end) return;
        on_line(c, t);
        c->line_used = 0;
        p = end + 1;
        n -= k + 1;
    }
}

// Takes what belongs to the head; how many bytes that was.
static size_t on_head(Client *c, const char *p, size_t n, uint64_t t) {
    size_t room = HEAD - 1 - c->head_used, kept = n < room ? n : room;
    memcpy(c->head + c->head_used, p, kept);
    c->head[c->head_used + kept] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) {
        c->head_used += kept;
        return n;
    }
    size_t taken = (size_t)(end + 4 - c->head) - c->head_used;
    end[2] = 0;
    c->head_used = 0;
    c->status = atoi(c->head + 9);
    if (c->status / 100 == 1) return taken;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    bool chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked");
    c->keep_alive = !strcasestr(c->head, "\r\nconnection: close");
    c->left = length && !chunked ? strtoul(length + 17, NULL, 10) : 0;
    c->state = chunked ? CHUNK_SIZE : length ? READ_LENGTH : READ_UNTIL_CLOSE;
    if (c->state == READ_LENGTH && !c->left) finish(c, t);
    return taken;
}

// Takes the next piece of an answer; how many bytes that was.
static size_t on_bytes(Client *c, const char *p, size_t n, uint64_t t) {
    size_t k = n < c->left ? n : c->left;
    switch (c->state) {
    case READ_HEAD:
        return on_head(c, p, n, t);
    case READ_UNTIL_CLOSE:
        on_body(c, p, n, t);
        return n;
    case READ_LENGTH:
        on_body(c, p, k, t);
        if (!(c->left -= k)) finish(c, t);
        return k;
    case CHUNK_DATA:
        on_body(c, p, k, t);
        if (!(c->left -= k)) c->state = CHUNK_END;
        return k;
    case CHUNK_SIZE:
        if (*p == '\n') {
            c->state = c->left ? CHUNK_DATA : TRAILER;
            c->trailer_used = 0;
        } else if (*p != '\r') {
            c->left = c->left * 16 + (size_t)(*p <= '9' ? *p - '0' : (*p | 32) - 'a' + 10);
        }
        return 1;
    case CHUNK_END:
        if (*p == '\n') c->state = CHUNK_SIZE;
        return 1;
    case TRAILER:
        if (*p == '\n') {
            if (!c->trailer_used) finish(c, t);
            c->trailer_used = 0;
        } else if (*p != '\r') {
            c->trailer_used++;
        }
        return 1;
    }
    return n;
}

static void read_on(Client *c) {
    static char data[262144];
    ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    uint64_t t = now();
    if (n <= 0) {
        if (c->busy && !n && c->state == READ_UNTIL_CLOSE) finish(c, t);
        errors += c->busy;
        c->busy = false;
        hang_up(c);
        return;
    }
    for (size_t at = 0; at < (size_t)n && c->busy;) at += on_bytes(c, data + at, (size_t)n - at, t);
    if (!c->busy && (!c->keep_alive || c->sent < request_bytes)) hang_up(c);
}

static void print_result(double elapsed, int unfinished) {
    Times *all[] = {&latency, &first_event, &lateness};
    for (int i = 0; i < 3; i++) qsort(all[i]->tenths, all[i]->count, sizeof *all[i]->tenths, by_size);
    printf("{\"done\": %ld, \"errors\": %ld, \"not_ok\": %ld, \"unfinished\": %d, \"seconds\": %.6f, \"events\": %ld", done,
           errors, not_ok, unfinished, elapsed, seen_events);
    const char *names[] = {"latency", "first_event", "late"};
    for (int i = 0; i < 3; i++)
        printf(", \"%s_p50\": %.1f, \"%s_p99\": %.1f, \"%s_max\": %.1f", names[i], percentile(all[i], 0.5), names[i],
               percentile(all[i], 0.99), names[i], percentile(all[i], 1));
    printf("}\n");
}

int main(int argc, char **argv) {
    for (int o; (o = getopt(argc, argv, "c:d:n:R:sk:g:b:u:i:f:")) != -1;) {
        switch (o) {
        case 'c': clients = atoi(optarg); break;
        case 'd': seconds = atof(optarg); break;
        case 'n': most = atol(optarg); break;
        case 'R': ramp = atoi(optarg); break;
        case 's': stream = true; break;
        case 'k': events = atoi(optarg); break;
        case 'g': gap = atoi(optarg); break;
        case 'b': body_bytes = (size_t)atol(optarg); break;
        case 'u': prompts = atol(optarg); break;
        case 'i': first_prompt = atol(optarg); break;
        case 'f': share = atof(optarg); break;
        default: return 2;
        }
    }
    if (optind != argc - 1) {
        fprintf(stderr, "usage: load PORT [options]\n");
        return 2;
    }
    port = atoi(argv[optind]);
    server = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    poller = epoll_create1(0);
    Client *all = calloc((size_t)clients, sizeof *all);
    if (!all) abort();
    for (int i = 0; i < clients; i++) all[i].fd = -1;
    write_requests(all);

    uint64_t began = now(), end = began + (uint64_t)(seconds * 1e9), last = began, step = (uint64_t)ramp * 1000000u / (uint64_t)clients;
    int opened = 0, busy = 0;
    for (struct epoll_event ready[READY];;) {
        uint64_t t = now();
        bool stopping = t >= end || (most >= 0 && started >= most);
        for (int i = 0; i < clients && !stopping; i++) {
            if (all[i].busy) continue;
            if (i >= opened && t < began + step * (uint64_t)i) break;
            if (i >= opened) opened = i + 1;
            start(&all[i]);
            stopping = most >= 0 && started >= most;
        }
        busy = 0;
        for (int i = 0; i < clients; i++) busy += all[i].busy;
        if (stopping && (!busy || t > end + GRACE_SECONDS * 1000000000ull)) break;
        int n = epoll_wait(poller, ready, READY, opened < clients ? 1 : 100);
        for (int i = 0; i < n; i++) {
            Client *c = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT) write_on(c);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_on(c);
            if (!c->busy && now() < end && (most < 0 || started < most)) start(c);
        }
        if (n > 0) last = now();
    }
    print_result((double)(last - began) / 1e9, busy);
    return 0;
}
