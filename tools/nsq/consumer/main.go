// The go-nsq contestants of ../../../benchmarks: a consumer of a prepared backlog that measures itself.
//
// It is given a job as JSON (benchmarks/job.py), prints its figures as one line of JSON when every copy has been
// handled, and ends when its standard input does. Figures lie between 5 % and 95 % of the copies.
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

const (
	sampleEvery = 5 * time.Millisecond
	timeout     = 300 * time.Second
)

type job struct {
	Kind        string   `json:"kind"`
	Topic       string   `json:"topic"`
	Channel     string   `json:"channel"`
	Nsqds       []string `json:"nsqds"`
	Messages    int64    `json:"messages"`
	Copies      int64    `json:"copies"`
	MaxInFlight int      `json:"max_in_flight"`
	Handlers    int      `json:"handlers"`
	Quick       bool     `json:"quick"`
	Check       bool     `json:"check"`
}

type sample struct {
	at     time.Time
	cpu    time.Duration
	copies int64
}

// counter handles a message by counting it.
type counter struct {
	copies, runs atomic.Int64
	lock         sync.Mutex
	seen         map[string]struct{} // with Kind "go_map": the naive way to de-duplicate
	bodies       map[string]struct{} // in a check
}

func (c *counter) HandleMessage(message *nsq.Message) error {
	if c.seen != nil && c.met(string(message.Body)) {
		c.copies.Add(1)
		return nil
	}
	if c.bodies != nil {
		c.lock.Lock()
		c.bodies[string(message.Body)] = struct{}{}
		c.lock.Unlock()
	}
	c.runs.Add(1)
	c.copies.Add(1)
	return nil
}

func (c *counter) met(body string) bool {
	c.lock.Lock()
	defer c.lock.Unlock()
	if _, met := c.seen[body]; met {
		return true
	}
	c.seen[body] = struct{}{}
	return false
}

// digest does not depend on the order: benchmarks/job.py has the same.
func (c *counter) digest() string {
	var all uint64
	for body := range c.bodies {
		sum := sha256.Sum256([]byte(body))
		all ^= binary.BigEndian.Uint64(sum[:8])
	}
	return fmt.Sprintf("%016x", all)
}

// within finds the first and the last sample between 5 % and 95 % of the copies.
func within(samples []sample, total int64) (start, end sample) {
	for _, one := range samples {
		if start.copies == 0 && one.copies*20 >= total {
			start = one
		}
		if one.copies*20 <= total*19 {
			end = one
		}
	}
	return start, end
}

func cpuTime() time.Duration {
	var usage syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// peakMemory is that of this program alone; ru_maxrss would begin with that of the process that started it.
func peakMemory() float64 {
	status, err := os.ReadFile("/proc/self/status")
	must(err)
	kilobytes, err := strconv.ParseFloat(string(regexp.MustCompile(`VmHWM:\s+(\d+)`).FindSubmatch(status)[1]), 64)
	must(err)
	return kilobytes / 1024
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	log.SetFlags(0)
	var work job
	must(json.Unmarshal([]byte(os.Args[1]), &work))
	handler := &counter{}
	if work.Kind == "go_map" {
		handler.seen = make(map[string]struct{})
	}
	if work.Check {
		handler.bodies = make(map[string]struct{})
	}
	config := nsq.NewConfig()
	config.MaxInFlight = work.MaxInFlight
	config.OutputBufferTimeout = 25 * time.Millisecond
	consumer, err := nsq.NewConsumer(work.Topic, work.Channel, config)
	must(err)
	consumer.SetLoggerLevel(nsq.LogLevelError)
	consumer.AddConcurrentHandlers(handler, work.Handlers)
	must(consumer.ConnectToNSQDs(work.Nsqds))

	total := work.Messages * work.Copies
	var samples []sample
	deadline := time.Now().Add(timeout)
	for {
		done := handler.copies.Load()
		if done >= total {
			break
		}
		samples = append(samples, sample{time.Now(), cpuTime(), done})
		if time.Now().After(deadline) {
			log.Fatalf("%d of %d copies after %v", done, total, timeout)
		}
		time.Sleep(sampleEvery)
	}
	figures := map[string]any{"runs": handler.runs.Load()}
	if work.Check {
		figures["digest"] = handler.digest()
	} else {
		start, end := within(samples, total)
		if work.Quick {
			start, end = samples[0], sample{time.Now(), cpuTime(), total}
		}
		span := float64(end.copies - start.copies)
		if span <= 0 {
			log.Fatalf("too few samples: give it more messages than %d", work.Messages)
		}
		figures["us_per_copy"] = float64((end.cpu - start.cpu).Nanoseconds()) / 1e3 / span
		figures["copies_per_s"] = span / end.at.Sub(start.at).Seconds()
		figures["peak_mb"] = peakMemory()
	}
	must(json.NewEncoder(os.Stdout).Encode(figures))
	_, err = io.Copy(io.Discard, os.Stdin)
	must(err)
}
