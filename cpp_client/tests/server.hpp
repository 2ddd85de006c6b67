// A publisher with sockets, for tests of a whole worker: ROUTER and XPUB of libzmq, in a thread.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <zmq.hpp>

#include "publisher.hpp"

namespace weightbus {

class Server {
 public:
  explicit Server(std::uint64_t epoch, const std::string& address = "tcp://127.0.0.1:*",
                  const std::string& model = "m")
      : context_(1), control_(context_, ZMQ_ROUTER), data_(context_, ZMQ_XPUB) {
    for (zmq::socket_t* socket : {&control_, &data_}) socket->set(zmq::sockopt::linger, 0);
    data_.set(zmq::sockopt::xpub_verbose, true);
    control_.bind(address);
    data_.bind("tcp://127.0.0.1:*");
    publisher_ = TinyPublisher(epoch, data_.get(zmq::sockopt::last_endpoint), model);
    topic_ = model + "/";
    publisher_.ping_ms = 100;
    thread_ = std::thread([this] { run(); });
  }

  ~Server() {
    stop_ = true;
    thread_.join();
  }

  std::string address() const { return control_.get(zmq::sockopt::last_endpoint); }

  // Publishes to all; returns the number of the version.
  std::uint64_t publish(Published published) {
    const std::lock_guard guard(mutex_);
    const std::uint64_t number = publisher_.publish(std::move(published));
    pending_.push_back(number);
    return number;
  }

  // What the worker has told, under the lock.
  template <class Ask>
  auto ask(Ask ask) const {
    const std::lock_guard guard(mutex_);
    return ask(publisher_);
  }

  // Waits until something holds, for as long as that may take on a busy machine.
  bool wait_until(const std::function<bool(const TinyPublisher&)>& holds) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < end) {
      if (ask(holds)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }

 private:
  void run() {
    auto beacon_at = std::chrono::steady_clock::now();
    while (!stop_) {
      zmq::pollitem_t items[] = {{control_.handle(), 0, ZMQ_POLLIN, 0},
                                 {data_.handle(), 0, ZMQ_POLLIN, 0}};
      zmq::poll(items, 2, std::chrono::milliseconds(5));
      const std::lock_guard guard(mutex_);
      if (items[0].revents != 0) answer();
      if (items[1].revents != 0 || std::chrono::steady_clock::now() >= beacon_at) {
        drain();
        broadcast(publisher_.beacon());
        beacon_at = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
      }
      for (const std::uint64_t number : std::exchange(pending_, {})) {
        if (!publisher_.has(number)) continue;  // newer ones have taken its place already
        for (const Message& message : publisher_.push(number)) broadcast(message);
      }
    }
  }

  void answer() {
    zmq::message_t identity, header;
    while (control_.recv(identity, zmq::recv_flags::dontwait)) {
      if (!control_.recv(header, zmq::recv_flags::none)) return;
      const auto said = decode<FromWorker>(Bytes(header.data(), header.size()), 0);
      if (!said) continue;
      for (const Message& message : publisher_.answer(*said)) {
        control_.send(zmq::buffer(identity.data(), identity.size()), zmq::send_flags::sndmore);
        send(control_, message);
      }
    }
  }

  void drain() {
    for (zmq::message_t subscription; data_.recv(subscription, zmq::recv_flags::dontwait);) {
    }
  }

  void broadcast(const Message& message) {
    const bool chunk = message[0].find("\"chunk\"") != std::string::npos;
    data_.send(zmq::buffer(topic_ + (chunk ? "dat" : "ctl")),
               zmq::send_flags::sndmore | zmq::send_flags::dontwait);
    send(data_, message);
  }

  static void send(zmq::socket_t& socket, const Message& message) {
    for (std::size_t i = 0; i < message.size(); ++i) {
      const auto more = i + 1 < message.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
      socket.send(zmq::buffer(message[i]), more | zmq::send_flags::dontwait);
    }
  }

  mutable std::mutex mutex_;
  TinyPublisher publisher_{1};
  std::string topic_;
  std::vector<std::uint64_t> pending_;
  zmq::context_t context_;
  zmq::socket_t control_, data_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace weightbus
